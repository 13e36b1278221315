"""What every test shares: the two tolerances, one thread, no hub, a fixed seed and a tiny model."""

from __future__ import annotations

import os
import signal

# Before torch and the Hugging Face libraries are imported, which read these once. Child processes inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

# The tolerances of every comparison in float32; a test that needs others says why.
RTOL, ATOL = 1e-5, 1e-7

torch.set_num_threads(1)
# A job started in the background ignores SIGINT, and so would all it starts: tests of Ctrl-C need the default.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """The same random numbers in every test, whatever ran before it in this process."""
    torch.manual_seed(0)


@pytest.fixture
def tiny_llama() -> LlamaForCausalLM:
    """A randomly initialised Llama, the same every time: 2 layers, hidden 32, 4 heads (2 for keys), vocabulary 64."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).float()
