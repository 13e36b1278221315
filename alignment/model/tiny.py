"""A Llama of a hundred thousand weights, drawn on the spot: for tests and for trying things out."""

from __future__ import annotations

import hashlib
import json
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from alignment.model.cache import build_once, cache_root
from alignment.model.hf import HFModel

SPECIAL = ("<|im_start|>", "<|im_end|>")
# ChatML as SmolLM2 has it, without a default system turn.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(eq=False)
class Tiny(HFModel):
    """HFModel whose folder is drawn on first use; `path` is where such folders are kept, None = the user's cache.

    The tokenizer has one token per byte, so any text can be encoded and every digit is a token; end of turn is EOS and
    pads. `seed` draws the weights: another number is another model.
    """

    _: KW_ONLY
    num_layers: int = 2
    hidden_size: int = 64
    seed: int = 0

    tiny: ClassVar[bool] = True

    @property
    def folder(self) -> str:
        content = [_tokenizer_json(), CHAT_TEMPLATE, self._config.to_diff_dict(), self.seed, torch.__version__]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
        root = Path(self.path).expanduser() if self.path else cache_root()
        name = f"tiny-{self.num_layers}x{self.hidden_size}-{self.seed}-{digest}"
        return str(build_once((root / name).resolve(), self._draw))

    @property
    def _config(self) -> LlamaConfig:
        eos = len(_alphabet()) + SPECIAL.index("<|im_end|>")
        return LlamaConfig(
            vocab_size=len(_alphabet()) + len(SPECIAL),
            hidden_size=self.hidden_size,
            intermediate_size=3 * self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=eos - 1,
            eos_token_id=eos,
            pad_token_id=eos,
        )

    def _draw(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(json.dumps(_tokenizer_json()), encoding="utf-8")
        start, end = SPECIAL
        PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            bos_token=start,
            eos_token=end,
            pad_token=end,
            chat_template=CHAT_TEMPLATE,
        ).save_pretrained(folder)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            LlamaForCausalLM(self._config).save_pretrained(folder)


def _alphabet() -> list[str]:
    """The printable stand-ins that byte-level tokenizers use for the bytes 0..255, in the order of the bytes."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _tokenizer_json() -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE without merges: token id = byte, then the special tokens."""
    alphabet = _alphabet()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(alphabet) + i, "content": text, **flags} for i, text in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {text: byte for byte, text in enumerate(alphabet)}, "merges": []},
    }
