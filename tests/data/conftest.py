"""Tokenizers whose ids can be written down by hand, and byte-level ones for chat templates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def toy_tokenizer(
    template: str | None = None, *, adds_bos: bool = False, pad: str = "<pad>"
) -> PreTrainedTokenizerFast:
    """pad 0, BOS 1, EOS 2, a 3, b 4, space 5, $ 6, " $" 7, ab 8: what pitfall B01 counts with."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, " ": 5, "$": 6, " $": 7, "ab": 8}
    model = Tokenizer(models.BPE(vocab=vocab, merges=[(" ", "$"), ("a", "b")]))
    model.add_special_tokens(["<pad>", "<s>", "</s>"])
    if adds_bos:
        model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>", pad_token=pad)
    tokenizer.chat_template = template
    return tokenizer


def byte_tokenizer(
    template: str | None = CHATML,
    *,
    specials: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
    eos: str = "<|im_end|>",
    bos: str | None = None,
) -> PreTrainedTokenizerFast:
    """One token per byte (id = its place in the alphabet), then the special tokens in order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, bos_token=bos, eos_token=eos, pad_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space (▁) before any text, as Llama 2's does."""
    letters = ["<unk>", "<s>", "</s>", "▁", "\n", "a", "b", "▁a", "▁b", "="]
    merges = [("▁", "a"), ("▁", "b")]
    model = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(letters)}, merges=merges, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=False)
    model.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always", split=False)
    model.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>", pad_token="</s>")


@pytest.fixture
def toy() -> Callable[..., PreTrainedTokenizerFast]:
    return toy_tokenizer


@pytest.fixture
def in_bytes() -> Callable[..., PreTrainedTokenizerFast]:
    return byte_tokenizer


@pytest.fixture
def sentencepiece() -> PreTrainedTokenizerFast:
    return sentencepiece_tokenizer()
