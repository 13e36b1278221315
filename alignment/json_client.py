"""JSON over HTTP to one server, with a bound on tries and on time. Standard library only."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Seconds before the second try; twice as many before each further one, or as many as the server asks for (Retry-After).
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 60.0
# Of the 4xx, those that another try may help: it took the server too long, or there were too many requests.
LATER = (408, 429)


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer like others: the key is for this server, and is sent to no other."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Unreachable(Exception):
    """Nothing came back within the bound: refused, broken off, timed out, or only answers of a server that is broken
    or busy (5xx, 408, 429)."""


class NoAnswer(Unreachable):
    """The server took the request and said nothing in time."""


@dataclass(frozen=True)
class Reply:
    """What the server said. value: parsed JSON, or the text where it is none."""

    status: int
    value: Any

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def text(self) -> str:
        """The server's own words about an error, on one line."""
        found = self.value
        while isinstance(found, Mapping) and (inner := found.get("error") or found.get("message")):
            found = inner
        return " ".join(str(found).split())[:500]


class JSONClient:
    """Asks one server, from any thread.

    key_variable: environment variable whose content is sent as the key, where there is one; read for each request and
        kept nowhere. proxies: whether those of the environment are used; a server beside the run needs none.
    """

    def __init__(
        self, url: str, *, timeout: float, num_tries: int, key_variable: str | None = None, proxies: bool = False
    ) -> None:
        self.url, self.timeout, self.num_tries, self.key_variable = url.rstrip("/"), timeout, num_tries, key_variable
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(None if proxies else {}), NoRedirect)

    def get(self, path: str) -> Reply:
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        data = json.dumps(body).encode()
        return self._ask(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}))

    def _ask(self, request: urllib.request.Request) -> Reply:
        """The reply, an error of ours (4xx) included. Raises Unreachable."""
        if self.key_variable and (key := os.environ.get(self.key_variable)):
            request.add_header("Authorization", f"Bearer {key}")
        why, asked_for = "", 0.0
        for number in range(self.num_tries):
            if number:
                time.sleep(min(LONGEST_PAUSE, max(asked_for, FIRST_PAUSE * 2 ** (number - 1))))
            try:
                with self._opener.open(request, timeout=self.timeout) as response:
                    return Reply(response.status, _parsed(response.read()))
            except urllib.error.HTTPError as error:
                reply = Reply(error.code, _parsed(error.read()))
                if error.code < 500 and error.code not in LATER:
                    return reply
                asked = error.headers.get("Retry-After", "")
                asked_for = float(asked) if asked.isdigit() else 0.0
                why = f"HTTP {error.code}: {reply.text}"
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", None) or error
                if isinstance(reason, TimeoutError):  # the same request would take as long again
                    raise NoAnswer(f"no answer within {self.timeout:g} s") from error
                why = f"{type(reason).__name__}: {reason}"
        raise Unreachable(f"{why}; {self.num_tries} tries")


def _parsed(data: bytes) -> Any:
    text = data.decode(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        return text
