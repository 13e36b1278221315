from __future__ import annotations

import dataclasses
import string
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from alignment.model.tiny import Tiny

CONF = Path(__file__).resolve().parents[2] / "conf" / "model"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path))
    return tmp_path


def test_its_defaults_are_those_of_the_yaml() -> None:
    conf = yaml.safe_load((CONF / "tiny.yaml").read_text())
    defaults = {f.name: f.default for f in dataclasses.fields(Tiny)}
    assert all(defaults[name] == value for name, value in conf.items() if name not in ("_target_", "defaults"))


def test_every_byte_is_a_token_and_text_survives() -> None:
    tokenizer = Tiny().tokenizer
    assert len(tokenizer) == 258 < 300
    for text in (string.printable, "  two  spaces\n\n", "naïve 北京 🙂", "a <|im_end|>b"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        plain = text.replace("<|im_end|>", "")
        assert [i for i in ids if i < 256] == list(plain.encode())  # a token id is the byte
    assert tokenizer.encode("2048") == [50, 48, 52, 56]


def test_end_of_turn_is_eos_and_pads_as_in_smollm2() -> None:
    source = Tiny()
    tokenizer = source.tokenizer
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id == tokenizer.pad_token_id == 257
    assert source.stop_ids == {257}
    assert tokenizer.decode([72, 105, 257], skip_special_tokens=True) == "Hi"


def test_chat_is_chatml() -> None:
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    render = Tiny().tokenizer.apply_chat_template
    assert render(messages, tokenize=False) == (
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    )
    prompt = render(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"


def test_settings_are_the_key_of_the_folder(cache: Path) -> None:
    folders = {Tiny(**changes).folder for changes in ({}, {"seed": 1}, {"num_layers": 1}, {"hidden_size": 32})}
    assert len(folders) == 4
    assert all(Path(folder).parent == cache for folder in folders)
    assert Tiny(path=str(cache / "elsewhere")).folder.startswith(str(cache / "elsewhere"))
    model = Tiny(num_layers=1, hidden_size=32).frozen()
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (1, 32)  # pyright: ignore


def test_weights_depend_on_its_seed_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = Tiny(path=str(tmp_path / "a")).frozen().state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = Tiny(path=str(tmp_path / "b")).frozen().state_dict()
    other = Tiny(path=str(tmp_path / "b"), seed=1).frozen().state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_it_is_an_ordinary_folder_that_loads_at_once() -> None:
    folder = Tiny().folder
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert time.perf_counter() - started < 1.0
    assert model.num_parameters() < 150_000
    ids = torch.tensor([[72, 105]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, Tiny().frozen()(ids).logits)
