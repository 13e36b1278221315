"""Without a network nobody waits for the hub."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from alignment import jobs


def unknown(*_: Any) -> Any:
    raise socket.gaierror(-2, "Name or service not known")


@pytest.mark.parametrize(
    ("environment", "lookup", "expected"),
    [
        ({}, unknown, "1"),
        ({}, lambda *_: [], None),
        ({"HTTPS_PROXY": "http://proxy:3128"}, unknown, None),
        ({"HF_HUB_OFFLINE": "0"}, unknown, "0"),
    ],
)
def test_the_hub_is_left_alone_where_its_name_is_not_known(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], lookup: Any, expected: str | None
) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that it is as before after the test
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    jobs._go_offline_without_network()
    assert os.environ.get("HF_HUB_OFFLINE") == expected


def test_another_endpoint_is_the_one_that_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example.org/mirror")
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: asked.append(host))
    jobs._go_offline_without_network()
    assert asked == ["hub.example.org"]
