"""The engine against `model.generate`, plain forwards, and itself with another batch size."""

from __future__ import annotations

import copy
import functools
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy import stats
from torch import nn
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from alignment.errors import UserError
from alignment.model.adapters import adapter_off, merged_weights
from alignment.rollout.hf import Completions, HFEngine, Mixture

STOPS = frozenset({2, 7, 11})
PROMPTS = [[5, 6, 8], [9, 10, 12, 13, 14, 15], [3], [4, 5] * 7, [2, 2, 9]]
# Log-probs of differently shaped float32 products, around 4 in size, differ by a few units in the last place.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def sampled(policy: nn.Module, prompts: list[list[int]] = PROMPTS, *, engine: HFEngine | None = None, **options):
    engine = engine or HFEngine(max_new_tokens=24, dtype="policy")
    defaults = {"group_size": 4, "stop_ids": STOPS, "pad_id": 0, "seed": 1}
    return engine.generate(policy, prompts, **{**defaults, **options})


def assert_same(ours: Completions, theirs: Completions) -> None:
    assert ours.ids == theirs.ids and ours.finished == theirs.finished
    for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), **CLOSE)


def greedy_of_transformers(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """`generate` on left-padded prompts, cut after the first stop token."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, eos_token_id=sorted(STOPS), pad_token_id=0
    )
    cut = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in STOPS), len(row))
        cut.append(row[:end])
    return cut


@contextmanager
def forwards(model: nn.Module, before: Callable[[torch.Size, torch.Size], None]) -> Iterator[None]:
    """Calls `before(shape of input_ids, shape of attention_mask)` ahead of every forward."""
    original = model.forward

    @functools.wraps(original)
    def watched(*args, **kwargs):
        before(kwargs["input_ids"].shape, kwargs["attention_mask"].shape)
        return original(*args, **kwargs)

    model.forward = watched
    try:
        yield
    finally:
        del model.forward


def lora(model: PreTrainedModel, **options) -> Any:
    """An adapter with an effect: peft starts B at zero."""
    policy = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", **options))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter) if "lora_" in name else 0.05)
    return policy


# ---- greedy ---------------------------------------------------------------------------------------------------------
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=2)),
    # Each token sees the last 5 only.
    "mistral_window": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, intermediate_size=64, num_key_value_heads=2, sliding_window=5)
    ),
    # Layers with and without a window, each kind with its own rotary frequencies.
    "gemma3_mixed": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES,
            intermediate_size=64,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    # Learned positions: a row that decodes beyond its own would be out of range.
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=45,
            initializer_range=0.5,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_generate(name: str, attention: str) -> None:
    """Ragged prompts, several stop ids, more rows than fit: token for token."""
    model = MODELS[name]().eval()
    model.set_attn_implementation(attention)
    prompts = [*PROMPTS, [20, 21], list(range(20, 31)), [33] * 5]
    expected = greedy_of_transformers(model, prompts, 30)
    assert len({len(row) for row in expected}) > 1, "rows of equal lengths would not leave the batch one by one"
    for max_batch in (3, 64):
        engine = HFEngine(max_new_tokens=30, temperature=0.0, dtype="policy", max_batch=max_batch)
        ours = sampled(model, prompts, engine=engine, group_size=1)
        assert ours.ids == expected
        assert ours.finished == [row[-1] in STOPS for row in expected]


# ---- what a completion depends on -----------------------------------------------------------------------------------
@pytest.mark.parametrize("max_batch", [1, 3, 7])
def test_the_batch_size_changes_nothing(tiny_llama: LlamaForCausalLM, max_batch: int) -> None:
    whole = sampled(tiny_llama)
    assert any(whole.finished) and not all(whole.finished)
    assert_same(sampled(tiny_llama, engine=HFEngine(max_new_tokens=24, dtype="policy", max_batch=max_batch)), whole)


def test_other_prompts_and_the_length_limit_change_nothing(tiny_llama: LlamaForCausalLM) -> None:
    whole, fewer = sampled(tiny_llama), sampled(tiny_llama, PROMPTS[:2])
    assert fewer.ids == whole.ids[:8]
    short = sampled(tiny_llama, max_new_tokens=5)
    assert short.ids == [ids[:5] for ids in whole.ids]
    assert short.finished == [done and len(ids) <= 5 for ids, done in zip(whole.ids, whole.finished)]


def test_seeds_differ_and_repeat(tiny_llama: LlamaForCausalLM) -> None:
    one, other = sampled(tiny_llama, seed=1), sampled(tiny_llama, seed=2)
    assert one.ids != other.ids
    assert one == sampled(tiny_llama, seed=1)
    assert len({tuple(ids) for ids in one.ids[:4]}) == 4, "completions of one prompt are drawn apart"


def test_the_checkpoints_generation_config_has_no_say(tiny_llama: LlamaForCausalLM) -> None:
    expected = sampled(tiny_llama)
    settings = tiny_llama.generation_config
    settings.temperature, settings.top_k, settings.repetition_penalty, settings.do_sample = 0.1, 1, 5.0, False
    settings.eos_token_id, settings.max_new_tokens, settings.min_new_tokens = 5, 2, 9
    assert_same(sampled(tiny_llama), expected)


def test_global_random_states_stay(tiny_llama: LlamaForCausalLM) -> None:
    policy = lora(tiny_llama)
    states = torch.get_rng_state(), random.getstate()
    sampled(policy, engine=HFEngine(max_new_tokens=5, dtype="bfloat16"))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


# ---- numbers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 3}])
def test_logprobs_are_the_trainers(tiny_llama: LlamaForCausalLM, settings: dict) -> None:
    """log_softmax(logits / temperature) of a plain forward over prompt and completion."""
    done = sampled(tiny_llama.eval(), **settings)
    for n, (ids, logprobs) in enumerate(zip(done.ids, done.logprobs, strict=True)):
        prompt = PROMPTS[n // 4]
        logits = tiny_llama(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
        expected = torch.log_softmax(logits / settings["temperature"], -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs).double(), expected.detach(), rtol=0, atol=1e-4)


@torch.no_grad()
def test_frequencies_of_two_tokens_are_the_models(tiny_llama: LlamaForCausalLM) -> None:
    """First token from the prefill, second from a decode step, both by chi-square against exact probabilities."""
    prompt, number, temperature = [5, 6, 8], 3000, 0.5
    done = sampled(
        tiny_llama.eval(), [prompt], group_size=number, stop_ids=set(), max_new_tokens=2, temperature=temperature
    )
    first = (tiny_llama(torch.tensor([prompt])).logits[0, -1].double() / temperature).softmax(-1)
    contexts = torch.tensor([[*prompt, token] for token in range(64)])
    second = first @ (tiny_llama(contexts).logits[:, -1].double() / temperature).softmax(-1)
    for position, expected in enumerate((first, second)):
        counts = torch.bincount(torch.tensor([ids[position] for ids in done.ids]), minlength=64)
        assert stats.chisquare(counts.numpy(), number * expected.numpy()).pvalue > 0.01


# ---- two models ------------------------------------------------------------------------------------------------------
def pair_of(kind: str, base: LlamaForCausalLM) -> tuple[Any, Any, Callable[[], Any]]:
    """A policy, plain forwards of the other model, and the context that gives the other model to the engine."""
    if kind == "frozen":
        other: Any = copy.deepcopy(base).eval()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        return base, other, lambda: nullcontext(other)
    bare = copy.deepcopy(base).eval()
    policy = lora(base)
    return policy, bare, lambda: adapter_off(policy)


@torch.no_grad()
def mixed(policy: Any, other: Any, ids: Any, coef: float, temperature: float) -> torch.Tensor:
    """softmax(((1 - coef) z + coef z') / temperature) at every position, in float64."""
    ids = torch.tensor(ids)
    logits = (1 - coef) * policy.eval()(ids).logits.double() + coef * other(ids).logits.double()
    return torch.log_softmax(logits / temperature, -1)


@pytest.mark.parametrize("dtype", ["policy", "float32"])
@pytest.mark.parametrize("kind", ["frozen", "adapter_off"])
def test_a_mixture_is_sampled_token_by_token(tiny_llama: LlamaForCausalLM, kind: str, dtype: str) -> None:
    """Against plain forwards of both models; "float32" samples an adapter's policy through its merged copy."""
    policy, other, context = pair_of(kind, tiny_llama)
    policy.train()
    engine = HFEngine(max_new_tokens=24, dtype=dtype, max_batch=3)  # rows come and go
    done = sampled(policy, engine=engine, temperature=0.7, mixture=Mixture(context, 0.3))
    assert policy.training
    lengths = {len(ids) for ids in done.ids}
    assert len(lengths) > 3
    apart = 0.0
    for n, (ids, logprobs) in enumerate(zip(done.ids, done.logprobs, strict=True)):
        prompt, taken = PROMPTS[n // 4], torch.tensor(ids)[:, None]
        expected = mixed(policy, other, [prompt + ids], 0.3, 0.7)[0, len(prompt) - 1 : -1].gather(-1, taken)[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs).double(), expected, rtol=0, atol=1e-4)
        alone = mixed(policy, other, [prompt + ids], 0.0, 0.7)[0, len(prompt) - 1 : -1].gather(-1, taken)[:, 0]
        apart = max(apart, float((alone - expected).abs().max()))
    assert apart > 0.1, "the other model has no say, so nothing was tested"


@pytest.mark.parametrize("kind", ["frozen", "adapter_off"])
def test_frequencies_of_two_tokens_are_the_mixtures(tiny_llama: LlamaForCausalLM, kind: str) -> None:
    """First token from the prefill, second from a decode step, both by chi-square against exact probabilities."""
    policy, other, context = pair_of(kind, tiny_llama)
    prompt, number = [5, 6, 8], 2000
    options: dict[str, Any] = {"group_size": number, "stop_ids": set(), "max_new_tokens": 2, "temperature": 0.5}
    done = sampled(policy, [prompt], mixture=Mixture(context, 0.6), **options)
    first = mixed(policy, other, [prompt], 0.6, 0.5)[0, -1].exp()
    second = first @ mixed(policy, other, [[*prompt, token] for token in range(64)], 0.6, 0.5)[:, -1].exp()
    for position, expected in enumerate((first, second)):
        counts = torch.bincount(torch.tensor([ids[position] for ids in done.ids]), minlength=64)
        assert stats.chisquare(counts.numpy(), number * expected.numpy()).pvalue > 0.01


@pytest.mark.parametrize("kind", ["frozen", "adapter_off"])
def test_the_ends_of_a_mixture_are_the_models_themselves(tiny_llama: LlamaForCausalLM, kind: str) -> None:
    policy, other, context = pair_of(kind, tiny_llama)
    assert_same(sampled(policy, mixture=Mixture(context, 0.0)), sampled(policy))
    assert_same(sampled(policy, mixture=Mixture(context, 1.0)), sampled(other))


def test_another_model_is_fetched_once(tiny_llama: LlamaForCausalLM) -> None:
    """A copy that waits in main memory must not travel for every token, and its mode is put back."""
    policy, other, _ = pair_of("frozen", tiny_llama)
    other.train()
    visits = []

    @contextmanager
    def visit() -> Iterator[Any]:
        visits.append("in")
        yield other
        visits.append("out")

    sampled(policy, mixture=Mixture(visit, 0.5))
    assert visits == ["in", "out"]
    assert other.training


@pytest.mark.parametrize("kind", ["frozen", "adapter_off"])
def test_too_little_memory_in_the_second_model_halves_the_batch(tiny_llama: LlamaForCausalLM, kind: str) -> None:
    """Both caches are given up together; an adapter that was off is on again."""
    policy, _, context = pair_of(kind, tiny_llama)
    expected = sampled(policy, mixture=Mixture(context, 0.5))
    engine, calls = HFEngine(max_new_tokens=24, dtype="policy", max_batch=8), []
    with context() as entered:
        model = entered.get_base_model() if kind == "adapter_off" else entered

    def fail(ids: torch.Size, mask: torch.Size) -> None:
        calls.append(ids)
        if len(calls) == 12:  # of one model with two states this is the second's, every other one
            raise torch.OutOfMemoryError("CUDA out of memory")

    with forwards(model, fail):
        done = sampled(policy, engine=engine, mixture=Mixture(context, 0.5))
    assert engine.max_batch == 4
    assert_same(done, expected)
    assert_same(sampled(policy, mixture=Mixture(context, 0.5)), expected)


# ---- ends of completions --------------------------------------------------------------------------------------------
def test_finished_means_the_last_token_is_a_stop_token(tiny_llama: LlamaForCausalLM) -> None:
    done = sampled(tiny_llama)
    assert {ids[-1] for ids, ended in zip(done.ids, done.finished) if ended} == STOPS, "each stop id ends some row"
    for ids, logprobs, ended in zip(done.ids, done.logprobs, done.finished, strict=True):
        assert len(ids) == len(logprobs) and not STOPS & set(ids[:-1])
        assert ended == (ids[-1] in STOPS) and (ended or len(ids) == 24)


def test_a_stop_token_at_the_limit_counts_as_finished(tiny_llama: LlamaForCausalLM) -> None:
    whole = sampled(tiny_llama)
    row = next(n for n, ended in enumerate(whole.finished) if ended)
    assert sampled(tiny_llama, max_new_tokens=len(whole.ids[row])).finished[row]


def test_the_pad_id_may_be_a_stop_token(tiny_llama: LlamaForCausalLM) -> None:
    """And in the prompt too: masks come from lengths."""
    assert_same(sampled(tiny_llama, pad_id=2), sampled(tiny_llama, pad_id=0))


def test_one_token_and_no_stop_ids(tiny_llama: LlamaForCausalLM) -> None:
    done = sampled(tiny_llama, max_new_tokens=1, stop_ids=())
    assert [len(ids) for ids in done.ids] == [1] * 20 and not any(done.finished)


# ---- work that is not done ------------------------------------------------------------------------------------------
def test_prompts_are_computed_once_and_finished_rows_leave(tiny_llama: LlamaForCausalLM) -> None:
    prefilled, decoded = [], []

    def count(ids: torch.Size, mask: torch.Size) -> None:
        (decoded if ids[1] == 1 and mask[1] > 1 else prefilled).append(ids[0])

    with forwards(tiny_llama, count):
        done = sampled(tiny_llama, engine=HFEngine(max_new_tokens=24, dtype="policy", max_batch=6))
    assert sum(prefilled) == len(PROMPTS)
    needed = sum(len(ids) - 1 for ids in done.ids)
    assert max(decoded) == 6
    assert needed <= sum(decoded) <= 1.05 * needed, "rows were computed for nothing"


# ---- memory ---------------------------------------------------------------------------------------------------------
FAULTS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory: you tried to allocate"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=["cuda", "cpu"])
def test_too_little_memory_halves_the_batch(tiny_llama: LlamaForCausalLM, fault: RuntimeError, caplog) -> None:
    """Also in the middle, when sequences have grown: rows restart from what they have, nothing else changes."""
    expected = sampled(tiny_llama)

    def check(ids: torch.Size, mask: torch.Size) -> None:
        if mask.numel() > 200:  # 20 rows do not fit, 10 up to 20 columns, 5 up to the end: 14 + 24 columns
            raise fault

    engine = HFEngine(max_new_tokens=24, dtype="policy", max_batch=20)
    with forwards(tiny_llama, check), caplog.at_level(logging.WARNING):
        assert_same(sampled(tiny_llama, engine=engine), expected)
    assert engine.max_batch == 5
    assert [record.args for record in caplog.records] == [(10,), (5,)]
    with forwards(tiny_llama, check), caplog.at_level(logging.WARNING):
        assert_same(sampled(tiny_llama, engine=engine), expected)
    assert len(caplog.records) == 2, "the smaller batch is kept, so the second call has no fault"


def test_what_cannot_be_helped_is_raised(tiny_llama: LlamaForCausalLM) -> None:
    def fail(text: str) -> Callable[[torch.Size, torch.Size], None]:
        def raise_it(ids: torch.Size, mask: torch.Size) -> None:
            raise RuntimeError(text)

        return raise_it

    tiny_llama.train()
    for text in ("not enough memory", "another fault"):
        with forwards(tiny_llama, fail(text)), pytest.raises(RuntimeError, match=text):
            sampled(tiny_llama)
    assert all(module.training for module in tiny_llama.modules())
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


# ---- the policy stays what it is ------------------------------------------------------------------------------------
def test_the_policy_is_sampled_without_dropout_and_left_as_it_was(tiny_llama: LlamaForCausalLM) -> None:
    policy = lora(tiny_llama, lora_dropout=0.5).train()
    policy.get_base_model().lm_head.eval()  # a mode of its own, as Lightning keeps it
    modes = [module.training for module in policy.modules()]
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    first = sampled(policy)
    assert first == sampled(policy), "dropout would make a difference"
    assert [module.training for module in policy.modules()] == modes
    after = policy.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_no_deprecated_call(tiny_llama: LlamaForCausalLM, caplog) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        sampled(tiny_llama, engine=HFEngine(max_new_tokens=3, dtype="bfloat16"))
    assert not caplog.records


# ---- copies ---------------------------------------------------------------------------------------------------------
ADAPTERS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "saved_head": {"modules_to_save": ["lm_head"]},
    "bias": {"bias": "all"},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_merged_copy_samples_what_the_policy_does(adapter: str, tied: bool) -> None:
    """Also after training, where a head that was tied to the embeddings has gone its own way."""
    config = LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=2, tie_word_embeddings=tied)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ensure_weight_tying.*")
        policy = lora(LlamaForCausalLM(config), **ADAPTERS[adapter])
    engine = HFEngine(max_new_tokens=24, dtype="float32")
    for _ in range(2):
        engine.sync(policy)
        assert engine._copy is not None
        assert_same(sampled(policy, engine=engine), sampled(policy))
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))


def test_a_tied_head_that_is_trained_in_the_second_step_only() -> None:
    """At the first sync it still equals the embeddings; the refresh must not write into them."""
    config = LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=2, tie_word_embeddings=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ensure_weight_tying.*")
        policy: Any = get_peft_model(
            LlamaForCausalLM(config), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
        )
    engine = HFEngine(max_new_tokens=24, dtype="float32")
    engine.sync(policy)
    with torch.no_grad():
        policy.get_base_model().lm_head.modules_to_save["default"].weight.add_(1.0)
    engine.sync(policy)
    assert_same(sampled(policy, engine=engine), sampled(policy))


def test_the_copy_is_refreshed_in_place_and_the_base_untouched(tiny_llama: LlamaForCausalLM) -> None:
    policy = lora(tiny_llama)
    base = policy.get_base_model().model.layers[0].self_attn.q_proj
    before = base.base_layer.weight.clone()
    engine = HFEngine(max_new_tokens=5, dtype="bfloat16")
    engine.sync(policy)
    assert engine._copy is not None
    weight = engine._copy.model.model.layers[0].self_attn.q_proj.weight
    place = weight.data_ptr()
    for _ in range(2):
        # W + alpha / r * B A with peft's defaults alpha = 8, r = 4.
        merged = before + 2.0 * base.lora_B["default"].weight @ base.lora_A["default"].weight
        torch.testing.assert_close(weight, merged.bfloat16(), rtol=2**-8, atol=0)
        with torch.no_grad():
            base.lora_A["default"].weight.mul_(-3.0)
        engine.sync(policy)
    assert engine._copy.model.model.layers[0].self_attn.q_proj.weight is weight and weight.data_ptr() == place
    assert torch.equal(base.base_layer.weight, before)
    assert {p.dtype for p in engine._copy.model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in engine._copy.model.parameters())
    inside = {id(p) for p in policy.parameters()} & {id(p) for p in engine._copy.model.parameters()}
    assert not inside


def test_auto_copies_under_autocast_only(tiny_llama: LlamaForCausalLM) -> None:
    policy = lora(tiny_llama)
    plain, cast, told = (HFEngine(max_new_tokens=5) for _ in range(3))
    plain.sync(policy)
    with torch.autocast("cpu", torch.bfloat16):
        cast.sync(policy)
        done = sampled(policy, engine=cast)
    told.sync(policy, compute_dtype=torch.bfloat16)
    assert plain._copy is None
    assert cast._copy is not None and told._copy is not None
    assert sampled(policy, engine=told) == done, "what the copy gives does not depend on autocast around it"


def test_no_copy_where_it_would_equal_the_policy(tiny_llama: LlamaForCausalLM) -> None:
    engine = HFEngine(max_new_tokens=5, dtype="float32")
    engine.sync(tiny_llama)
    assert engine._copy is None


def test_changed_weights_are_noticed(tiny_llama: LlamaForCausalLM) -> None:
    """A step, or another adapter, between sync and sampling."""
    policy = lora(tiny_llama)
    base = copy.deepcopy(policy.get_base_model())
    engine = HFEngine(max_new_tokens=24, dtype="float32")
    first = sampled(policy, engine=engine)
    with adapter_off(policy):
        without = sampled(policy, engine=engine)
    plain = LlamaForCausalLM(base.config)
    with adapter_off(policy):
        plain.load_state_dict(dict(merged_weights(policy)))
    assert_same(without, sampled(plain))
    assert_same(sampled(policy, engine=engine), first)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1.0)
    policy(torch.tensor([[3, 4, 5]])).logits.square().mean().backward()
    optimizer.step()
    assert_same(sampled(policy, engine=engine), sampled(policy))


def test_another_policy_is_sampled_as_it_is(tiny_llama: LlamaForCausalLM) -> None:
    other = LlamaForCausalLM(tiny_llama.config)
    engine = HFEngine(max_new_tokens=24, dtype="float32")
    policy = lora(tiny_llama)
    engine.sync(policy)
    assert_same(sampled(other, engine=engine), sampled(other))


def test_what_cannot_be_merged_is_sampled_as_it_is(tiny_llama: LlamaForCausalLM, caplog) -> None:
    policy = lora(tiny_llama, trainable_token_indices=[1, 2])
    engine = HFEngine(max_new_tokens=24, dtype="float32")
    with caplog.at_level(logging.WARNING):
        engine.sync(policy)
        done = sampled(policy, engine=engine)
    assert [record.name for record in caplog.records] == ["alignment.rollout.hf"]
    assert "TrainableTokensWrapper" in caplog.text
    assert_same(done, sampled(policy))


# ---- refusals -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": []}, "0 prompts"),
        ({"group_size": 0}, "0 completions"),
        ({"prompts": [[1], [1] * 500]}, "prompt 1 has 500 tokens .* 512 positions: lower rollout.max_new_tokens"),
        ({"max_new_tokens": 0}, "rollout.max_new_tokens: 0"),
        ({"temperature": -1.0}, "rollout.temperature: -1.0"),
        ({"top_p": 0.0}, "rollout.top_p: 0.0"),
        ({"top_p": 1.5}, "rollout.top_p: 1.5"),
        ({"top_k": -1}, "rollout.top_k: -1"),
    ],
)
def test_bad_input_is_refused(tiny_llama: LlamaForCausalLM, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sampled(tiny_llama, **options)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(UserError, match=r"rollout.dtype=auto"):
        HFEngine(max_new_tokens=1, dtype="int4")
    with pytest.raises(UserError, match=r"rollout.max_batch"):
        HFEngine(max_new_tokens=1, max_batch=0)


def test_diverged_weights_are_named(tiny_llama: LlamaForCausalLM) -> None:
    with torch.no_grad():
        tiny_llama.lm_head.weight[3] = float("nan")
    with pytest.raises(UserError, match=r"token 0 of completion .* diverged"):
        sampled(tiny_llama)


def test_a_model_with_another_kind_of_state_is_refused() -> None:
    config = BambaConfig(
        **SIZES, intermediate_size=64, num_key_value_heads=2, mamba_n_heads=4, mamba_d_head=16, attn_layer_indices=[1]
    )
    with pytest.raises(UserError, match=r"BambaForCausalLM keeps .* rollout=vllm"):
        sampled(BambaForCausalLM(config))
