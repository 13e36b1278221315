"""`build` gives libraries plain Python values, and `external_problems` binds their signatures."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from alignment.config import build, external_problems
from alignment.errors import UserError


@dataclass
class Setting:
    value: int = 1


def test_lists_and_dicts_reach_a_library_as_they_are(tmp_path: Path) -> None:
    node = {
        "_target_": "peft.LoraConfig",
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": ["lm_head"],
        "rank_pattern": {"q_proj": 4},
    }
    made = build(node)
    assert isinstance(made, LoraConfig)
    assert type(made.modules_to_save) is list
    assert type(made.rank_pattern) is dict
    made.save_pretrained(str(tmp_path))  # fails where a list is not a list
    again = LoraConfig.from_pretrained(str(tmp_path))
    assert isinstance(again, LoraConfig)
    assert set(again.target_modules or ()) == {"q_proj", "v_proj"}
    assert again.modules_to_save == ["lm_head"]


def test_what_code_passes_is_passed_as_it_is() -> None:
    setting, rows = Setting(3), [1, 2]
    made = build({"_target_": "builtins.dict", "a": 1}, setting=setting, rows=rows)
    assert made == {"a": 1, "setting": setting, "rows": rows}
    assert made["setting"] is setting
    assert made["rows"] is rows


def test_a_partial_stays_one() -> None:
    made = build({"_target_": "torch.optim.AdamW", "_partial_": True, "betas": [0.9, 0.99]})
    assert isinstance(made, functools.partial)
    optimizer = made([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert list(optimizer.param_groups[0]["betas"]) == [0.9, 0.99]


def test_inner_nodes_are_built_first() -> None:
    made = build({"_target_": "builtins.dict", "inner": {"_target_": "fractions.Fraction", "numerator": 3}})
    assert made["inner"] == 3


def test_a_missing_package_is_told_in_words() -> None:
    with pytest.raises(UserError, match="type pip install nosuchpackage"):
        build({"_target_": "nosuchpackage.Thing"})


def test_an_error_of_the_called_code_keeps_its_type() -> None:
    with pytest.raises(ZeroDivisionError):
        build({"_target_": "fractions.Fraction", "numerator": 1, "denominator": 0})


def external(**changes: Any) -> dict[str, Any]:
    optimizer = {"_target_": "torch.optim.AdamW", "_partial_": True, "eps": 1e-8}
    return {"optimizer": optimizer, "trainer": {"devices": 1}} | changes


def test_targets_of_other_packages_are_bound() -> None:
    assert external_problems(external()) == []
    wrong = {"_target_": "torch.optim.AdamW", "_partial_": True, "ep": 1e-8, "params": []}
    found = external_problems(
        external(optimizer=wrong, trainer={"profilr": 1}, logger={"_target_": "torch.nosuch.Thing"})
    )
    assert [message.split(":")[0] for message in found] == [
        "optimizer.ep",
        "optimizer.params",
        "logger._target_",
        "trainer.profilr",
    ]
    assert "type optimizer.eps=" in found[0]
