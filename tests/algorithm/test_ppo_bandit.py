"""PPO on a tree small enough to enumerate, with a table for a policy and one for a critic: where both end up.

Tokens a, b and the end; completions of one to three tokens, whatever comes first of the end and the third token. With
KL weight beta the best policy is ref * exp(r / beta), normalised, and under it the return from a state is the same
whatever follows: beta * log of the mean of exp(r / beta) under the reference. That is what the critic has to learn.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from alignment.algorithm.ppo import PPO
from alignment.batch import Batch, pad
from alignment.model.logprobs import TokenScores

BETA, NUM_ROWS, ROLLOUTS = 0.5, 2048, 80
END = 2
STATES = [prefix for length in range(3) for prefix in itertools.product((0, 1), repeat=length)]
COMPLETIONS = [(*prefix, token) for prefix in STATES for token in range(3) if token == END or len(prefix) == 2]
REFERENCE = torch.randn(len(STATES), 3, generator=torch.Generator().manual_seed(7)) * 0.7
SCORES = torch.rand(len(COMPLETIONS), generator=torch.Generator().manual_seed(3)) * 1.5


class Table(nn.Module):
    """Numbers per state; state k is the k-th of STATES."""

    def __init__(self, numbers: Tensor) -> None:
        super().__init__()
        self.numbers = nn.Parameter(numbers.clone())

    def at(self, batch: Batch) -> Tensor:
        """(N, C, ...): the numbers of the state before each token. A state is a number in binary after a leading 1."""
        ids = batch.completion_ids.clamp(max=1)
        places = [torch.ones_like(ids[:, 0])]
        for t in range(ids.shape[1] - 1):
            places.append(2 * places[-1] + ids[:, t])
        return self.numbers[torch.where(batch.completion_mask, torch.stack(places, 1) - 1, 0)]


class Policy(Table):
    def token_scores(self, batch: Batch) -> TokenScores:
        logprobs = self.at(batch).log_softmax(-1)
        chosen = logprobs.gather(-1, batch.completion_ids[..., None]).squeeze(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1).detach()
        return TokenScores(
            torch.where(batch.completion_mask, chosen, 0.0), torch.where(batch.completion_mask, entropy, 0.0)
        )


class Values(Table):
    reads_policy = False

    def forward(self, policy: nn.Module, batch: Batch, *, path: str) -> Tensor:
        return torch.where(batch.completion_mask, self.at(batch), 0.0)


def batch_of(indices: list[int]) -> Batch:
    ids, mask = pad([COMPLETIONS[i] for i in indices])
    prompts = torch.zeros(len(indices), 1, dtype=torch.long)
    batch = Batch(prompts, prompts == 0, ids, mask, None, 1)
    batch.rewards = SCORES[torch.tensor(indices)]
    batch.finished = torch.tensor([COMPLETIONS[i][-1] == END for i in indices])
    return batch


EVERY = batch_of(list(range(len(COMPLETIONS))))


def probabilities(policy: Policy) -> Tensor:
    with torch.no_grad():
        return policy.token_scores(EVERY).logprobs.sum(-1).exp()


def soft_values() -> list[float]:
    """beta log sum over completions below the state of ref(completion | state) exp(r / beta), by the definition."""
    reference, found = REFERENCE.softmax(-1), []
    for k, prefix in enumerate(STATES):
        total = 0.0
        for completion, score in zip(COMPLETIONS, SCORES.tolist(), strict=True):
            if completion[: len(prefix)] == prefix:
                steps = range(len(prefix), len(completion))
                chance = math.prod(float(reference[STATES.index(completion[:t]), completion[t]]) for t in steps)
                total += chance * math.exp(score / BETA)
        found.append(BETA * math.log(total))
        assert k == STATES.index(prefix)
    return found


def optimum() -> Tensor:
    weights = probabilities(Policy(REFERENCE)) * (SCORES / BETA).exp()
    return weights / weights.sum()


def distance(a: Tensor, b: Tensor) -> float:
    """Total variation."""
    return 0.5 * float((a - b).abs().sum())


@pytest.fixture
def trained(online, keys_of, learn):
    """trained(**changes) -> policy and critic after 80 rollouts."""

    def train(**changes: Any) -> tuple[Policy, Values]:
        keys = keys_of("ppo") | {"beta": BETA, "microbatch_size": NUM_ROWS, "critic": "head", "value_clip_eps": None}
        module = online(PPO, **(keys | {"group_size": 1, "whiten_advantages": False} | changes))
        policy, critic = Policy(REFERENCE), Values(torch.zeros(len(STATES)))
        module.policy, module.critic, module.reference.model = policy, critic, Policy(REFERENCE)
        module._score = lambda model, batch, **options: model.token_scores(batch)
        optimizer = torch.optim.Adam([policy.numbers, critic.numbers])
        rng, history = torch.Generator().manual_seed(0), []
        for rollout in range(ROLLOUTS):
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - rollout / ROLLOUTS)
            drawn = torch.multinomial(probabilities(policy), NUM_ROWS, replacement=True, generator=rng)
            batches = module.prepare_rollout(batch_of(sorted(drawn.tolist())))
            for _ in range(module.num_iterations):
                learn(module, batches)
                optimizer.step()
            history.append([table.numbers.detach().clone() for table in (policy, critic)])
        for table, numbers in zip((policy, critic), zip(*history[ROLLOUTS // 2 :], strict=True), strict=True):
            table.numbers.data = torch.stack(numbers).mean(0)  # less of the samples' noise
        return policy, critic

    return train


def test_it_starts_elsewhere() -> None:
    start = probabilities(Policy(REFERENCE))
    assert len(COMPLETIONS) == 15
    assert float(start.sum()) == pytest.approx(1, abs=1e-6)
    assert distance(start, optimum()) > 0.4


@pytest.mark.parametrize("gae_lambda", [0.95, 1.0])
def test_policy_and_critic_end_at_the_optimum(trained, gae_lambda: float) -> None:
    policy, critic = trained(gae_lambda=gae_lambda)
    assert distance(probabilities(policy), optimum()) < 0.02
    # States are visited as often as the policy gets there: the rare ones are known less well.
    torch.testing.assert_close(critic.numbers.data, torch.tensor(soft_values()), rtol=0, atol=0.05)


def test_whitening_changes_the_way_and_not_the_end(trained) -> None:
    """At the optimum every advantage is 0, so that its scale does not matter; near it whitening makes noise large."""
    policy, _ = trained(whiten_advantages=True)
    assert distance(probabilities(policy), optimum()) < 0.06


def test_without_the_kl_the_best_completion_is_left(trained) -> None:
    policy, _ = trained(beta=0.0)
    assert int(probabilities(policy).argmax()) == int(SCORES.argmax())
    assert float(probabilities(policy).max()) > 0.8
