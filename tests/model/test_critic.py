"""Values before each token from four kinds of critic, and what each shares with the policy."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from alignment.batch import Batch, Example, collate
from alignment.errors import UserError
from alignment.model.adapters import (
    CRITIC,
    adapter_off,
    adapter_parameters,
    copy_adapter,
    merged_weights,
    trainable_state,
    use_adapter,
)
from alignment.model.critic import Critic, Kind
from alignment.model.hf import HFModel
from alignment.model.logprobs import completion_logprobs
from alignment.ref_strategy.lora import LoRA

KINDS: list[Kind] = ["adapter", "model", "head", "detached_head"]


@pytest.fixture
def folder(tiny_llama: LlamaForCausalLM, tmp_path: Path) -> str:
    tiny_llama.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture
def source(folder: str, monkeypatch: pytest.MonkeyPatch) -> HFModel:
    monkeypatch.setattr(HFModel, "tokenizer", NoTokenizer())
    return HFModel(folder, lora={"r": 4, "lora_alpha": 8})


class NoTokenizer:
    def save_pretrained(self, folder: str) -> None: ...


def batch() -> Batch:
    """Two prompts of 3 and 5 tokens, three completions each, of 1 to 6 tokens."""
    rng = torch.Generator().manual_seed(3)
    draw = functools.partial(torch.randint, 3, 64, generator=rng)
    lengths = {3: (4, 1, 6), 5: (2, 5, 3)}
    return collate([Example(draw((p,)).tolist(), [draw((n,)).tolist() for n in each]) for p, each in lengths.items()])


def jolt(parameters: Any, scale: float = 0.1) -> None:
    """What training does: no weight stays where it started."""
    with torch.no_grad():
        for parameter in parameters:
            parameter += scale * torch.randn_like(parameter)


def attached(kind: Kind, source: HFModel) -> tuple[Critic, Any]:
    policy = source.policy()
    jolt(trainable_state(policy).values())
    critic = Critic(kind)
    critic.attach(source, policy)
    return critic, policy


def values_of(critic: Critic, policy: nn.Module, rows: Batch) -> Tensor:
    if critic.reads_policy:
        return critic.read(completion_logprobs(policy, rows, states=True), rows)
    return critic(policy, rows)


def naive(model: Any, critic: Critic, rows: Batch) -> Tensor:
    """One sequence at a time, without padding: the head on the state from which each token is predicted."""
    head, values = critic.head, torch.zeros(rows.completion_ids.shape)
    assert head is not None
    for n, ids in enumerate(rows.completion_ids):
        p = n // rows.group_size
        prompt, completion = rows.prompt_ids[p][rows.prompt_mask[p]], ids[rows.completion_mask[n]]
        out = model(input_ids=torch.cat([prompt, completion])[None], output_hidden_states=True)
        for t in range(len(completion)):
            state = out.hidden_states[-1][0, len(prompt) + t - 1]
            values[n, t] = (state * head.weight[0]).sum() + head.bias[0]
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_a_loop_over_tokens(kind: Kind, source: HFModel) -> None:
    critic, policy = attached(kind, source)
    rows = batch()
    assert torch.equal(values_of(critic, policy, rows), torch.zeros(6, 6))  # a head of zeros
    jolt(critic.trained(policy))
    with torch.no_grad():
        got = values_of(critic, policy, rows)
        if kind == "adapter":
            with use_adapter(policy, CRITIC):
                expected = naive(policy, critic, rows)
        else:
            expected = naive(policy if critic.model is None else critic.model, critic, rows)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert got.dtype == torch.float32
    assert not got[~rows.completion_mask].any()
    assert got[rows.completion_mask].std() > 0.01


def test_one_pass_gives_log_probs_and_states(source: HFModel) -> None:
    critic, policy = attached("head", source)
    jolt(critic.trained(policy))
    rows = batch()
    together = completion_logprobs(policy, rows, states=True)
    assert torch.equal(together.logprobs, completion_logprobs(policy, rows).logprobs)
    torch.testing.assert_close(critic.read(together, rows), critic(policy, rows))
    assert completion_logprobs(policy, rows).states is None


@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_whose_weights_the_value_loss_moves(kind: Kind, adapter: Any, folder: str) -> None:
    """Only the critic's own, but for `head`, which shares its states with the policy."""
    if (kind, adapter) == ("adapter", "none"):
        with pytest.raises(UserError, match=r"type algorithm\.critic=model"):
            attached(kind, HFModel(folder, adapter=adapter))
        return
    critic, policy = attached(kind, HFModel(folder, adapter=adapter))
    own = critic.trained(policy)
    mine = {id(parameter) for parameter in own}
    of_policy = [p for p in policy.parameters() if p.requires_grad and id(p) not in mine]
    jolt(own)
    values_of(critic, policy, batch()).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in own)
    assert any(parameter.grad is not None for parameter in of_policy) == (kind == "head")
    expected = 2  # weight and bias of the value head
    if kind in ("adapter", "model"):
        expected += len(of_policy) - (adapter == "none")  # the vocabulary head is no part of a critic
    assert len(own) == expected


def test_an_adapter_changes_neither_policy_nor_reference_nor_what_samples(source: HFModel) -> None:
    policy: Any = source.policy()
    jolt(trainable_state(policy).values())
    rows, reference = batch(), LoRA()
    reference.attach(source, policy)

    def passes() -> list[Tensor]:
        with torch.no_grad(), adapter_off(policy):
            off = completion_logprobs(policy, rows).logprobs
        with torch.no_grad():
            return [completion_logprobs(policy, rows).logprobs, off, *(t.clone() for _, t in merged_weights(policy))]

    before, own = passes(), set(trainable_state(policy))
    critic = Critic("adapter")
    critic.attach(source, policy)
    assert own < set(trainable_state(policy))  # the policy's adapter trains as before, and the critic's too
    jolt(critic.trained(policy), scale=1.0)
    with torch.no_grad():
        critic(policy, rows)
    for one, other in zip(before, passes(), strict=True):
        assert torch.equal(one, other)


def test_a_further_adapter_freezes_none_that_trains(source: HFModel) -> None:
    critic, policy = attached("adapter", source)
    before = set(trainable_state(policy))
    copy_adapter(policy, "reward")
    assert set(trainable_state(policy)) == before
    assert len(critic.trained(policy)) == 2 + len(adapter_parameters(policy, CRITIC))


def test_the_saved_folder_is_the_policy_alone(source: HFModel, tmp_path: Path) -> None:
    critic, policy = attached("adapter", source)
    jolt(critic.trained(policy), scale=1.0)
    source.save(policy, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "adapter_model.safetensors")
    assert len(stored) == len(adapter_parameters(policy))
    assert not list((tmp_path / "model").glob("critic*"))
    loaded: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source.folder), tmp_path / "model")
    rows = batch()
    with torch.no_grad():
        expected = completion_logprobs(policy, rows).logprobs
        torch.testing.assert_close(completion_logprobs(loaded, rows).logprobs, expected, rtol=1e-5, atol=1e-6)


def test_a_critic_starts_from_the_adapter_that_training_starts_from(source: HFModel, tmp_path: Path) -> None:
    first = source.policy()
    jolt(trainable_state(first).values())
    source.save(first, tmp_path / "model")
    again = HFModel(source.folder, adapter_path=str(tmp_path / "model"))
    rows = batch()
    values = []
    for kind in ("adapter", "model", "head"):
        policy = again.policy()
        critic = Critic(kind)
        critic.attach(again, policy)
        assert critic.head is not None
        with torch.no_grad():
            critic.head.weight.fill_(0.1)
            values.append(values_of(critic, policy, rows))
    torch.testing.assert_close(values[0], values[2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(values[1], values[2], rtol=1e-5, atol=1e-6)


def test_an_adapter_and_a_model_of_its_own_learn_the_same(source: HFModel) -> None:
    rows, curves = batch(), []
    target = torch.linspace(-1, 1, 6).expand(6, 6)
    for kind in ("adapter", "model"):
        torch.manual_seed(1)
        critic, policy = attached(kind, source)
        optimizer = torch.optim.Adam(critic.trained(policy), lr=0.01)
        losses = []
        for _ in range(20):
            loss = ((critic(policy, rows) - target)[rows.completion_mask] ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0][-1] < 0.7 * curves[0][0]
    torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(curves[1]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_building_uses_no_random_number(kind: Kind, source: HFModel) -> None:
    policy = source.policy()
    before = torch.get_rng_state()
    Critic(kind).attach(source, policy)
    assert torch.equal(torch.get_rng_state(), before)


def test_activation_checkpointing_computes_again_with_the_critics_adapter(folder: str) -> None:
    """Backward runs when the adapter is no longer on: without care the block would be computed with the policy's."""
    gradients, rows = [], batch()
    for checkpointing in (False, True):
        torch.manual_seed(1)
        critic, policy = attached("adapter", HFModel(folder, gradient_checkpointing=checkpointing))
        jolt(critic.trained(policy), scale=0.3)
        values = critic(policy, rows)
        logprobs = completion_logprobs(policy, rows).logprobs
        (values.square().sum() + logprobs.sum()).backward()
        gradients.append([p.grad for p in policy.parameters() if p.requires_grad])
    assert all(grad is not None and grad.any() for grad in gradients[0])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-5, atol=1e-6)


def test_a_base_that_is_trained_itself_cannot_be_shared(source: HFModel) -> None:
    policy: Any = source.policy()
    policy.get_base_model().get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"1 weights of the base are trained .*type algorithm\.critic=model"):
        Critic("adapter").attach(source, policy)
