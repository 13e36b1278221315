"""The README.md of an exported model: what the hub reads, what a reader reads, and what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from alignment.experiment.card import Facts, licence_of, model_card, shareable

CONFIG: dict[str, Any] = {
    "seed": 3,
    "algorithm": {"_target_": "alignment.algorithm.dpo.DPO", "beta": 0.1, "loss": "ipo"},
    "ref_strategy": {"_target_": "alignment.ref_strategy.lora.LoRA"},
    "model": {"_target_": "alignment.model.hf.HFModel", "path": "/home/me/models/base", "adapter": "lora"},
    "data": {
        "_target_": "alignment.data.mix.Mix",
        "sources": {
            "a": {"_target_": "alignment.data.hub.Hub", "name": "owner/pairs"},
            "b": {"_target_": "alignment.data.jsonl.Jsonl", "path": "/home/me/private/rows.jsonl"},
        },
    },
    "reward": {"accuracy": {"weight": 1.0}, "format": {"weight": 0.5}},
    "strategy": {"_target_": "alignment.strategy.auto.Auto"},
    "hub_token": "hf_secret",
}
SUMMARY = {"before/loss": 25.0, "val/loss": 4.5, "val/kl": float("nan"), "train/loss": 3.25, "steps": 7, "done": True}
MANIFEST = {
    "git": {"commit": "abc", "dirty": False},
    "data": {"train": "61 examples, sha256 11d8", "rows": {"kept": 61}},
    "packages": {"torch": "2.13.0", "numpy": "2.4"},
}


def facts(**changes: Any) -> Facts:
    given: dict[str, Any] = {"name": "HF-DPO", "kind": "language model", "config": CONFIG, "summary": SUMMARY}
    given |= {"manifest": MANIFEST, "step": 7, "dtype": "bfloat16", "merged": True, "base": "owner/base"}
    return Facts(**(given | {"licence": "apache-2.0"} | changes))


def front(text: str) -> dict[str, Any]:
    _, head, _ = text.split("---\n", 2)
    return yaml.safe_load(head)


def test_what_the_hub_reads() -> None:
    assert front(model_card(facts())) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "owner/base",
        "base_model_relation": "finetune",
        "license": "apache-2.0",
        "tags": ["alignment", "dpo", "lora"],
        "datasets": ["owner/pairs"],
    }


def test_what_is_not_known_is_not_said_to_the_hub() -> None:
    found = front(model_card(facts(base="/home/me/models/base", licence=None)))
    assert not {"base_model", "base_model_relation", "license"} & found.keys()


def test_what_a_reader_reads() -> None:
    text = model_card(facts(notes=["Something else."], place="me/mine"))
    assert 'AutoModelForCausalLM.from_pretrained("me/mine")' in text
    assert "trained with DPO from `owner/base`, after 7 optimizer steps" in text
    assert "Something else." in text
    assert "| loss | 25 | 4.5 |" in text
    assert "| train/loss | 3.25 |" in text
    assert "nan" not in text
    assert "| scored by | `accuracy` (1), `format` (0.5) |" in text
    assert "commit `abc`" in text
    assert "| data, train | 61 examples, sha256 11d8 |" in text
    assert "torch 2.13.0" in text and "numpy" not in text
    assert text.count("@misc{") == 3  # DPO, IPO, LoRA


def test_keys_and_folders_of_the_machine_are_not_shown() -> None:
    text = model_card(facts(base="/home/me/models/base"))
    assert "/home/me" not in text
    assert "hf_secret" not in text
    assert "path: rows.jsonl" in text
    assert shareable({"api_key": "sk-1", "x": ["~/a/b", "c/d", 1, None]}) == {
        "api_key": "***",
        "x": ["b", "c/d", 1, None],
    }


def test_each_kind_says_how_it_is_used() -> None:
    for kind, word, pipeline in (
        ("scorer", "AutoModelForSequenceClassification", "text-classification"),
        ("step scorer", "AutoModelForTokenClassification", "token-classification"),
        ("critic", "AutoModelForTokenClassification", "token-classification"),
    ):
        text = model_card(facts(kind=kind))
        assert word in text and front(text)["pipeline_tag"] == pipeline
        assert kind.replace(" ", "-") in front(text)["tags"]


def test_an_adapter_says_what_it_is_loaded_onto() -> None:
    text = model_card(facts(merged=False))
    assert front(text)["library_name"] == "peft" and front(text)["base_model_relation"] == "adapter"
    assert 'AutoModelForCausalLM.from_pretrained("owner/base")' in text
    scorer = model_card(facts(merged=False, kind="step scorer", num_labels=2))
    assert 'AutoModelForTokenClassification.from_pretrained("owner/base", num_labels=2)' in scorer
    config = CONFIG | {"strategy": {"_target_": "alignment.strategy.qlora.QLoRA", "double_quant": False}}
    rounded = model_card(facts(merged=False, config=config))
    assert "import AutoModelForCausalLM, BitsAndBytesConfig" in rounded
    assert 'bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=False)' in rounded
    assert "qlora" in front(rounded)["tags"]


def test_examples_are_programs() -> None:
    for kind in ("language model", "scorer", "step scorer", "critic"):
        for merged in (True, False):
            text = model_card(facts(kind=kind, merged=merged))
            compile(text.split("```python\n")[1].split("```")[0], kind, "exec")


def test_the_licence_of_a_base(tmp_path: Path) -> None:
    assert licence_of(tmp_path) is None
    (tmp_path / "LICENSE").write_text("\n   Apache License\n   Version 2.0")
    assert licence_of(tmp_path) == "apache-2.0"
    (tmp_path / "README.md").write_text("---\nlicense: llama3\n---\n# Base\n")
    assert licence_of(tmp_path) == "llama3"
    (tmp_path / "README.md").write_text("# Base\n")
    assert licence_of(tmp_path) == "apache-2.0"
