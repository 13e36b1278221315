"""Embeddings of prompts against one prompt at a time without padding."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model

from alignment.batch import Example, collate
from alignment.model.adapters import adapter_off
from alignment.model.embeddings import prompt_embeddings

PROMPTS = [[5, 6, 7, 8], [9], [3, 4]]


def test_a_prompts_embedding_is_the_mean_of_its_last_hidden_states(tiny_llama) -> None:
    found = prompt_embeddings(tiny_llama, collate([Example(prompt) for prompt in PROMPTS]))
    with torch.no_grad():
        alone = [tiny_llama(torch.tensor([p]), output_hidden_states=True).hidden_states[-1][0].mean(0) for p in PROMPTS]
    torch.testing.assert_close(found, torch.stack(alone), rtol=1e-5, atol=1e-6)
    assert found.dtype == torch.float32 and not found.requires_grad


def test_adapters_count_while_they_are_on_and_completions_never_do(tiny_llama) -> None:
    batch = collate([Example(prompt) for prompt in PROMPTS])
    plain = prompt_embeddings(tiny_llama, batch)
    policy = get_peft_model(tiny_llama, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    assert not torch.equal(prompt_embeddings(policy, batch), plain)
    replied = collate([Example(prompt, [[11, 2]]) for prompt in PROMPTS])
    with adapter_off(policy):
        torch.testing.assert_close(prompt_embeddings(policy, replied), plain, rtol=1e-5, atol=1e-6)
