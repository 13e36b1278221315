"""Every path's log-probs against one forward per completion and torch's log_softmax, values and gradients."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from alignment.batch import Batch, Example, collate
from alignment.data.datamodule import StepStream
from alignment.errors import UserError
from alignment.model import logprobs as module
from alignment.model import shared_attention
from alignment.model.logprobs import completion_logprobs, completion_states, padding

RTOL, ATOL = 1e-5, 1e-6  # log-probs are sums over some tens of float32 terms of size 4
PATHS = ("dense", "packed", "cache")
# A prompt length and the lengths of its completions: ragged, with an empty completion and one of a single token.
GROUPS = {
    1: [(3, [4]), (1, [1]), (6, [0]), (2, [7])],
    2: [(3, [4, 2]), (1, [0, 1]), (5, [6, 6])],
    8: [(4, [1, 3, 0, 5, 5, 2, 8, 4]), (2, [7, 1, 1, 2, 3, 4, 5, 6])],
}


def examples(shape: list[tuple[int, list[int]]], vocab: int = 64) -> list[Example]:
    generator = torch.Generator().manual_seed(7)

    def tokens(length: int) -> list[int]:
        return torch.randint(3, vocab, (length,), generator=generator).tolist()

    return [Example(tokens(prompt), [tokens(length) for length in completions]) for prompt, completions in shape]


def naive(model: nn.Module, rows: list[Example], temperature: float = 1.0) -> Tensor:
    """One forward per completion, without padding; log-prob of token t from the logits one position earlier."""
    completions = [(row.prompt_ids, completion) for row in rows for completion in row.completions]
    width = max(1, *(len(completion) for _, completion in completions))
    result = []
    for prompt, completion in completions:
        if completion:
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].float() / temperature
            logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            result.append(logprobs[range(len(completion)), completion])
        else:
            result.append(torch.zeros(0))
    return torch.stack([nn.functional.pad(row, (0, width - len(row))) for row in result])


def lora(model: nn.Module, **settings: Any) -> nn.Module:
    torch.manual_seed(3)
    config = LoraConfig(r=2, lora_alpha=4, **{"target_modules": "all-linear", **settings})
    return get_peft_model(model, config)  # type: ignore[arg-type]


def randomise_adapter(model: nn.Module) -> None:
    """B starts at zero, where A gets no gradient."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)


def gradients(model: nn.Module, logprobs: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 1, logprobs.numel()).view(logprobs.shape)
    (logprobs * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor], relative: float = 1e-4) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert (got[name] - want[name]).norm() <= relative * want[name].norm() + 1e-7, name


@contextmanager
def watched_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    taken: list[str] = []
    choose = module._choose

    def spy(*args: Any) -> str:
        taken.append(choose(*args))
        return taken[-1]

    monkeypatch.setattr(module, "_choose", spy)
    yield taken


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("adapter", [False, True])
def test_equals_one_forward_per_completion(tiny_llama: LlamaForCausalLM, group: int, path: str, adapter: bool) -> None:
    model = lora(tiny_llama) if adapter else tiny_llama
    randomise_adapter(model)
    rows = examples(GROUPS[group])
    batch = collate(rows)
    want = naive(model, rows, temperature=0.5)
    got = completion_logprobs(model, batch, temperature=0.5, path=path, chunk_tokens=5).logprobs
    assert got.dtype == torch.float32
    assert not got[~batch.completion_mask].any()
    torch.testing.assert_close(got, want, rtol=RTOL, atol=ATOL)
    assert_same_gradients(gradients(model, got), gradients(model, want))


def test_numbers_of_log_probs_and_of_response_tokens_agree() -> None:
    """B09: p1 p2 p3 r1 r2 under a uniform model of 4 words: 2 ln(1/4) = -2.7726, not one term or three."""
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    model.lm_head.weight.data.zero_()
    batch = collate([Example([1, 2, 3], [[1, 2]])])
    for path in PATHS:
        logprobs = completion_logprobs(model, batch, path=path).logprobs
        assert logprobs.sum().item() == pytest.approx(2 * math.log(1 / 4), rel=1e-6)


def test_temperature_is_the_samplers() -> None:
    """B18: logits [2, 0] at temperature 0.5 give log sigmoid(4) = -0.01815 for the policy, old and reference alike."""
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=2, hidden_size=2, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1)
    )
    for parameter in model.parameters():
        parameter.data.zero_()
    model.model.embed_tokens.weight.data[:] = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    model.model.norm.weight.data.fill_(1.0)  # the last state is (1, 1) up to the norm's epsilon
    model.lm_head.weight.data[:] = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    for path in PATHS:
        logprobs = completion_logprobs(model, collate([Example([0], [[0]])]), temperature=0.5, path=path).logprobs
        assert logprobs.item() == pytest.approx(-0.018150, abs=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_float64_and_bf16(tiny_llama: LlamaForCausalLM, path: str) -> None:
    rows = examples(GROUPS[2])
    batch = collate(rows)
    double = completion_logprobs(tiny_llama.double(), batch, path=path).logprobs
    assert double.dtype == torch.float64
    single = tiny_llama.float()
    torch.testing.assert_close(double.float(), naive(single, rows), rtol=RTOL, atol=ATOL)
    with torch.autocast("cpu", torch.bfloat16):
        half = completion_logprobs(single, batch, path=path).logprobs
    stored = completion_logprobs(single.bfloat16(), batch, path=path).logprobs
    for low in (half, stored):
        assert low.dtype == torch.float32
        assert (low - double).abs().max() < 0.05  # bf16 keeps 8 bits


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("autocast", [False, True])
def test_policy_old_and_reference_passes_are_bit_equal(tiny_llama: LlamaForCausalLM, path: str, autocast: bool) -> None:
    """Ratio exactly 1, KL exactly 0 at step 0: with grad and without, adapter at its start and off."""
    policy = lora(tiny_llama).train()
    batch = collate(examples(GROUPS[8]))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        new = completion_logprobs(policy, batch, path=path, entropy=True)
        with torch.no_grad():
            old = completion_logprobs(policy, batch, path=path)
            with policy.disable_adapter():  # type: ignore[operator]
                reference = completion_logprobs(policy, batch, path=path)
    assert new.logprobs.requires_grad
    assert torch.equal(new.logprobs, old.logprobs)
    assert torch.equal(new.logprobs, reference.logprobs)


@pytest.mark.parametrize("path", ["dense", "packed"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_activation_checkpointing_changes_nothing(
    tiny_llama: LlamaForCausalLM, path: str, reentrant: bool, autocast: bool
) -> None:
    """B65: every adapter matrix gets the gradient it gets without checkpointing."""
    policy = lora(tiny_llama).train()
    randomise_adapter(policy)
    batch = collate(examples(GROUPS[2]))

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logprobs = completion_logprobs(policy, batch, path=path).logprobs
        return logprobs, gradients(policy, logprobs)

    plain, plain_gradients = run()
    tiny_llama.activation_checkpointing_enable({"use_reentrant": reentrant})
    tiny_llama.enable_input_require_grads()
    calls = counted_calls(tiny_llama.model.layers[0].mlp)
    checkpointed, checkpointed_gradients = run()
    assert len(calls) == 2  # once in forward, once again in backward
    assert torch.equal(checkpointed, plain)
    assert all(gradient.any() for gradient in checkpointed_gradients.values())
    assert_same_gradients(checkpointed_gradients, plain_gradients, relative=1e-5)


def counted_calls(layer: nn.Module) -> list[int]:
    calls: list[int] = []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def test_checkpointing_forbids_the_cache(tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = collate(examples(GROUPS[2]))
    tiny_llama.activation_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(UserError, match=r"cache is not exact for LlamaForCausalLM: activation checkpointing drops"):
        completion_logprobs(tiny_llama, batch, path="cache")
    tiny_llama.set_attn_implementation("eager")
    with watched_path(monkeypatch) as taken:
        completion_logprobs(tiny_llama, batch)
        tiny_llama.activation_checkpointing_disable()
        completion_logprobs(tiny_llama, batch)
    assert taken == ["dense", "cache"]


@pytest.mark.parametrize("group", GROUPS)
def test_auto_packs(tiny_llama: LlamaForCausalLM, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched_path(monkeypatch) as taken:
        completion_logprobs(tiny_llama, collate(examples(GROUPS[group])))
    assert taken == ["packed"]


def small(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """A model of another architecture, random and tiny."""
    common = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{name}Config")(**{**common, **settings})
    return lambda: AutoModelForCausalLM.from_config(config).eval()


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
GQA = {"num_key_value_heads": 2}
GEMMA = {**GQA, "head_dim": 8}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 2,
}
ARCHITECTURES: list[tuple[str, dict[str, Any], str]] = [
    # What is special about it, and the path that auto must take.
    ("Qwen2", GQA, "packed"),
    ("Qwen3", GEMMA, "packed"),
    ("GPT2", GPT2, "packed"),  # learned positions
    ("OPT", {"ffn_dim": 32, "max_position_embeddings": 64, "word_embed_proj_dim": 16}, "packed"),  # nested decoder
    ("GPTNeoX", {}, "packed"),  # rotates a part of each head
    ("Cohere", {**GQA, "logit_scale": 0.3}, "packed"),
    ("Granite", {**GQA, "logits_scaling": 3.0, "attention_multiplier": 0.7}, "packed"),
    ("DeepseekV3", LATENT, "packed"),  # values narrower than keys
    ("Mistral", {**GQA, "sliding_window": 64}, "packed"),
    ("Mistral", {**GQA, "sliding_window": 6}, "dense"),
    ("Gemma2", {**GEMMA, "sliding_window": 6, "final_logit_softcapping": 0.05}, "dense"),
    ("Gemma3Text", {**GEMMA, "sliding_window": 6}, "dense"),
    ("GptOss", {**GEMMA, "num_local_experts": 2, "num_experts_per_tok": 1}, "dense"),  # attention sinks
    ("Bloom", {"n_head": 2, "n_layer": 2}, "cache"),  # positions are biases of the attention
    ("Falcon", {"alibi": True}, "cache"),
    ("Mamba", {}, "dense"),
    ("Lfm2", {**GQA, "full_attn_idxs": [1]}, "dense"),  # convolutions
]


@pytest.mark.parametrize(("name", "settings", "path"), ARCHITECTURES, ids=lambda value: str(value)[:12])
def test_other_architectures(
    name: str, settings: dict[str, Any], path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = small(name, **settings)()
    for parameter in model.parameters():  # random weights near zero would hide a soft cap or a scale
        parameter.data.mul_(3.0)
    rows = examples(GROUPS[8])
    with watched_path(monkeypatch) as taken, torch.no_grad(), caplog.at_level(logging.WARNING, "alignment"):
        got = completion_logprobs(model, collate(rows)).logprobs
        completion_logprobs(model, collate(rows))
        want = naive(model, rows)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-6)
    assert taken == [path] * 2
    told = [record for record in caplog.records if record.name == module.__name__]
    assert len(told) == (path != "packed")  # said once


def test_a_head_that_is_not_all_there_is_to_it_is_refused(tiny_llama: LlamaForCausalLM) -> None:
    class Doubled(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = 2 * output.logits  # type: ignore[operator]
            return output

    with pytest.raises(UserError, match="the logits of Doubled are not its output embedding"):
        completion_logprobs(Doubled(tiny_llama.config), collate(examples(GROUPS[2])))


def test_refuses_what_it_cannot_do_right(tiny_llama: LlamaForCausalLM) -> None:
    batch = collate(examples(GROUPS[2]))
    with pytest.raises(UserError, match="'fast' is none of auto, dense, packed, cache"):
        completion_logprobs(tiny_llama, batch, path="fast")
    with pytest.raises(UserError, match="prompt 1 of the batch has no tokens"):
        completion_logprobs(tiny_llama, collate([Example([3], [[4]]), Example([], [[5]])]))
    with pytest.raises(UserError, match="the batch holds prompts only"):
        completion_logprobs(tiny_llama, collate([Example([3], [])]))
    with pytest.raises(UserError, match="expected a Hugging Face causal LM"):
        completion_logprobs(tiny_llama.model, batch)
    with pytest.raises(UserError, match="greedy decoding"):
        completion_logprobs(tiny_llama, batch, temperature=0.0)
    virtual = get_peft_model(tiny_llama, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(UserError, match="virtual tokens"):
        completion_logprobs(virtual, batch)


def test_packed_is_refused_under_eager_attention(tiny_llama: LlamaForCausalLM) -> None:
    tiny_llama.set_attn_implementation("eager")
    with pytest.raises(UserError, match="attention implementation 'eager' cannot share prompts"):
        completion_logprobs(tiny_llama, collate(examples(GROUPS[2])), path="packed")


def test_statistics_fill_the_mask(tiny_llama: LlamaForCausalLM) -> None:
    rows = examples(GROUPS[2])
    batch = collate(rows)
    scores = completion_logprobs(tiny_llama, batch, entropy=True, stats=("log_sum_sq_probs", "is_top1"))
    assert scores.entropy is not None
    assert scores.log_sum_sq_probs is not None
    assert scores.is_top1 is not None
    assert not scores.entropy.requires_grad
    prompt, completion = rows[2].prompt_ids, rows[2].completions[0]
    p = tiny_llama(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].softmax(-1)
    torch.testing.assert_close(scores.entropy[4], -(p * p.log()).sum(-1), rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(scores.log_sum_sq_probs[4], (p**2).sum(-1).log(), rtol=RTOL, atol=ATOL)
    assert scores.is_top1[4].tolist() == (p.argmax(-1) == torch.tensor(completion)).tolist()
    for values in (scores.entropy, scores.log_sum_sq_probs, scores.is_top1):
        assert not values[~batch.completion_mask].any()
    assert completion_logprobs(tiny_llama, batch).entropy is None


def test_entropy_bonus_has_the_gradient_of_the_entropy(tiny_llama: LlamaForCausalLM) -> None:
    rows = examples([(3, [4])])
    scores = completion_logprobs(tiny_llama, collate(rows), entropy_grad=True)
    p = tiny_llama(input_ids=torch.tensor([rows[0].prompt_ids + rows[0].completions[0]])).logits[0, 2:-1].softmax(-1)
    assert scores.entropy is not None
    assert_same_gradients(gradients(tiny_llama, scores.entropy), gradients(tiny_llama, -(p * p.log()).sum(-1)[None]))


@pytest.mark.parametrize("settings", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_adapter_on_the_head(tiny_llama: LlamaForCausalLM, settings: dict[str, Any]) -> None:
    policy = lora(tiny_llama, **settings)
    randomise_adapter(policy)
    rows = examples(GROUPS[2])
    got = completion_logprobs(policy, collate(rows), chunk_tokens=4).logprobs
    want = naive(policy, rows)
    torch.testing.assert_close(got, want, rtol=RTOL, atol=ATOL)
    assert_same_gradients(gradients(policy, got), gradients(policy, want))


@pytest.mark.parametrize("path", PATHS)
def test_documents_of_one_row_do_not_see_each_other(tiny_llama: LlamaForCausalLM, path: str) -> None:
    """No leakage: other tokens in one document leave the others' log-probs and gradients bit for bit as they are."""
    rows = examples([(3, [4]), (6, [5]), (2, [7])])
    changed = [rows[0], Example([9] * 6, [[11, 12, 13, 14, 2]]), rows[2]]
    scores = [completion_logprobs(tiny_llama, collate(r), path=path).logprobs for r in (rows, changed)]
    assert torch.equal(scores[0][[0, 2]], scores[1][[0, 2]])
    assert not torch.equal(scores[0][1], scores[1][1])
    apart = [gradients(tiny_llama, values[[0, 2]]) for values in scores]
    assert all(torch.equal(apart[0][name], apart[1][name]) for name in apart[0] if "embed_tokens" not in name)
    touched = apart[1]["model.embed_tokens.weight"][[9, 11, 12, 13, 14]].any(1)
    own = {token for row in (rows[0], rows[2]) for token in row.prompt_ids + row.completions[0]}
    assert touched.tolist() == [token in own for token in (9, 11, 12, 13, 14)]


def test_padding_is_counted_by_path(tiny_llama: LlamaForCausalLM) -> None:
    """Fed: prompts 3, 1, 5; completions less their last token 3 + 1, 0 + 0, 5 + 5."""
    batch = collate(examples(GROUPS[2]))
    assert padding(tiny_llama, batch, path="packed") == (0, 23)
    # 3 prompts of width 5, then 6 completions of width 5
    assert padding(tiny_llama, batch, path="cache") == (45 - 23, 45)
    # rows of 6, 4, 1, 1, 10, 10 tokens in 6 x 10
    assert padding(tiny_llama, batch, path="dense") == (60 - 32, 60)


def test_rows_grouped_by_length_leave_little_padding(tiny_llama: LlamaForCausalLM) -> None:
    """Rows of 20 to 220 tokens in microbatches of 8, where nothing can be packed: under 5 % in windows of 16 steps."""
    generator = torch.Generator().manual_seed(0)
    shapes = torch.stack(
        [torch.randint(10, 111, (1024,), generator=generator), torch.randint(10, 111, (1024,), generator=generator)], 1
    )
    rows = examples([(prompt, [completion]) for prompt, completion in shapes.tolist()])
    sizes = {"batch_size": 16, "microbatch_size": 8, "total_steps": 64, "rank": 0, "world_size": 1, "seed": 0}

    def share(window: int, path: str) -> float:
        steps = StepStream(rows, **sizes, length_window=window)
        padded, computed = zip(*(padding(tiny_llama, steps[i], path=path) for i in range(len(steps))), strict=True)
        return sum(padded) / sum(computed)

    assert share(16, "dense") < 0.05 < share(1, "dense")
    assert share(1, "auto") == 0


@pytest.mark.parametrize("path", PATHS)
def test_completions_of_a_single_token(tiny_llama: LlamaForCausalLM, path: str) -> None:
    rows = examples([(3, [1, 1]), (2, [0, 1])])
    got = completion_logprobs(tiny_llama, collate(rows), path=path).logprobs
    torch.testing.assert_close(got, naive(tiny_llama, rows), rtol=RTOL, atol=ATOL)
    assert got.shape == (4, 1)


def test_no_completion_token_at_all(tiny_llama: LlamaForCausalLM) -> None:
    for path in PATHS:
        logprobs = completion_logprobs(tiny_llama, collate(examples([(3, [0, 0])])), path=path).logprobs
        assert logprobs.tolist() == [[0.0], [0.0]]
        logprobs.sum().backward()  # a rank without tokens still takes part in backward


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("before", [True, False])
def test_states_before_and_at_each_token(tiny_llama: LlamaForCausalLM, path: str, before: bool) -> None:
    rows = examples(GROUPS[2])
    got = completion_states(tiny_llama, collate(rows), path=path, before=before)
    want = []
    for row in rows:
        for completion in row.completions:
            ids = torch.tensor([row.prompt_ids + completion])
            states = tiny_llama.model(input_ids=ids).last_hidden_state[0]
            first = len(row.prompt_ids) - before
            want.append(states[first : first + len(completion)])
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-5, atol=5e-6)


def test_hooks_of_the_root_see_the_computation(tiny_llama: LlamaForCausalLM) -> None:
    """Sharding strategies gather weights in hooks on the model itself."""
    calls = counted_calls(tiny_llama)
    completion_logprobs(tiny_llama, collate(examples(GROUPS[2])))
    assert calls == [1]
    assert "forward" not in vars(tiny_llama)


def test_sharded_weights_give_the_same(tiny_llama: LlamaForCausalLM, tmp_path: Path) -> None:
    """FSDP2 keeps weights in pieces and joins them in hooks, here in a group of one process."""
    batch = collate(examples(GROUPS[2]))
    policy = lora(tiny_llama)
    randomise_adapter(policy)
    want = completion_logprobs(policy, batch).logprobs
    want_gradients = gradients(policy, want)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for part in (*tiny_llama.model.layers, tiny_llama):
            fully_shard(part, mesh=mesh)
        for path in PATHS:
            got = completion_logprobs(policy, batch, path=path).logprobs
            torch.testing.assert_close(got, want, rtol=RTOL, atol=ATOL)
            whole = {name: gradient.full_tensor() for name, gradient in gradients(policy, got).items()}  # type: ignore[attr-defined]
            assert_same_gradients(whole, want_gradients)
    finally:
        dist.destroy_process_group()


def test_a_padded_batch_gives_the_same_as_a_tight_one(tiny_llama: LlamaForCausalLM) -> None:
    """Wider padding, and any token in it, changes nothing: masks decide."""
    batch = collate(examples(GROUPS[2]))
    wide = Batch(
        nn.functional.pad(batch.prompt_ids, (3, 0), value=5),
        nn.functional.pad(batch.prompt_mask, (3, 0), value=False),
        nn.functional.pad(batch.completion_ids, (0, 2), value=5),
        nn.functional.pad(batch.completion_mask, (0, 2), value=False),
        group_size=2,
    )
    tight = completion_logprobs(tiny_llama, batch).logprobs
    loose = completion_logprobs(tiny_llama, wide).logprobs
    assert torch.equal(loose[:, :-2], tight)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_shared_prompts_on_a_real_model(adapter: str) -> None:
    """SmolLM2-135M in float32, ragged prompts and completions: log-probs and gradients within 1e-4 of dense."""
    from alignment.model.smollm2 import SmolLM2

    policy = SmolLM2(adapter=adapter).policy()  # type: ignore[arg-type]
    randomise_adapter(policy)
    batch = collate(examples([(37, [5, 12, 0, 9]), (21, [16, 1, 7, 3])], vocab=49_152))
    logprobs, grads = {}, {}
    for path in PATHS:
        logprobs[path] = completion_logprobs(policy, batch, path=path).logprobs
        grads[path] = gradients(policy, logprobs[path])
    for path in ("packed", "cache"):
        off = (logprobs[path] - logprobs["dense"]).abs().max() / logprobs["dense"].abs().max()
        assert off <= 1e-4
        assert_same_gradients(grads[path], grads["dense"], relative=1e-4)
        worst = max(
            float((grads[path][name] - grads["dense"][name]).norm() / grads["dense"][name].norm())
            for name in grads["dense"]
        )
        print(f"\n{adapter} {path}: log-probs within {off:.1e}, gradients within {worst:.1e} relative of dense")


class TestAttention:
    """`SharedRow.attend` on its own: both kernels against a softmax over a mask, in float64."""

    SHAPES = (([5, 3], [[4, 2, 6], [1, 0, 1]]), ([2, 4, 1], [[3], [0], [5]]), ([4], [[2, 2, 2, 2]]))

    @staticmethod
    def masked(row: shared_attention.SharedRow, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        mask = torch.zeros(row.num_tokens, row.num_tokens, dtype=torch.bool)
        start = 0
        for prompt, completions in zip(row.prompt_lengths, row.completion_lengths, strict=True):
            first = start
            for position in range(first, first + prompt):
                mask[position, first : position + 1] = True
            start += prompt
            for length in completions:
                for position in range(start, start + length):
                    mask[position, first : first + prompt] = True
                    mask[position, start : position + 1] = True
                start += length
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        scores = (query @ key.mT * scale).masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2)

    @pytest.mark.parametrize("lengths", SHAPES)
    @pytest.mark.parametrize("kernel", ["blocks", "small blocks", "recomputed", "padded"])
    def test_equals_masked_softmax(
        self, lengths: tuple[list[int], list[list[int]]], kernel: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if kernel == "small blocks":
            monkeypatch.setattr(shared_attention, "BLOCK_ROWS", 2)
            monkeypatch.setattr(shared_attention, "BLOCK_SCORES", 40)
        if kernel == "recomputed":
            monkeypatch.setattr(shared_attention, "KEPT_SCORES", 0)
        row = shared_attention.SharedRow(*lengths, "cpu")
        query, key, value = (
            torch.randn(1, heads, row.num_tokens, width, dtype=torch.float64, requires_grad=True)
            for heads, width in ((4, 6), (2, 6), (2, 5))
        )
        if kernel == "padded":
            got = shared_attention._padded_attention(row, query, key, value, 0.3, 0.0)
        else:
            got = row.attend(query, key, value, 0.3)
        want = self.masked(row, query, key, value, 0.3)
        weights = torch.randn_like(want)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        for mine, theirs in zip(
            torch.autograd.grad((got * weights).sum(), (query, key, value)),
            torch.autograd.grad((want * weights).sum(), (query, key, value)),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)

    def test_other_calls_go_to_the_function_that_was_there(self, tiny_llama: LlamaForCausalLM) -> None:
        ids = torch.tensor([[5, 6, 7, 8]])
        plain = tiny_llama(input_ids=ids).logits
        shared_attention.install()
        once = dict(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS)
        shared_attention.install()
        assert dict(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS) == once
        assert torch.equal(tiny_llama(input_ids=ids).logits, plain)

    def test_work_does_not_grow_with_the_square_of_the_row(self) -> None:
        """8 completions of 32 after 170: 170^2 + 8 * 32 * 202 pairs at most, not (170 + 256)^2."""
        row = shared_attention.SharedRow([170], [[32] * 8], "cpu")
        pairs = sum(block.num_scores for block in row.blocks(9))
        assert pairs <= 170**2 + 8 * 32 * 202
