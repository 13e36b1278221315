"""Problems small enough to enumerate, whose solution is known: where each algorithm ends up.

Three tokens, completions of one or two of them, a table of logits for a policy, a reference that is not flat. With KL
weight beta the best policy is ref * exp(r / beta), normalised. What an objective makes of that is written out per case;
"within" is the total variation distance to it, over all completions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from alignment.algorithm.grpo import GRPO
from alignment.algorithm.nash_md import NashMD
from alignment.algorithm.online_dpo import OnlineDPO
from alignment.algorithm.reinforce_pp import ReinforcePP
from alignment.algorithm.rloo import RLOO
from alignment.algorithm.xpo import XPO
from alignment.batch import Batch
from alignment.model.logprobs import TokenScores

BETA, NUM_ROWS, STEPS, WITHIN = 0.5, 1024, 120, 0.005
# r of completion (a, b) is SCORES[a][b]; of completion (a) alone SCORES[a][0].
SCORES = torch.tensor([[0.7, 0.5, 0.6], [0.0, 0.2, 1.6], [0.3, 0.8, 0.2]])
# Line 0: the first token. Lines 1 to 3: the second, after 0, 1, 2.
REFERENCE = torch.tensor([[0.5, 0.0, -0.4], [0.0, 0.3, -0.3], [0.6, -0.2, 0.0], [0.0, 0.0, 0.5]])


class Table(nn.Module):
    """A policy of logits, one line per state."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(REFERENCE.clone())

    def token_logprobs(self, ids: Tensor) -> Tensor:
        states = torch.cat([torch.zeros_like(ids[:, :1]), 1 + ids[:, :-1]], 1)
        return self.logits.log_softmax(-1)[states].gather(-1, ids[..., None]).squeeze(-1)


def completions(length: int) -> Tensor:
    """All of them, (3 or 9, length)."""
    return torch.cartesian_prod(*[torch.arange(3)] * length).view(-1, length)


def rewards_of(ids: Tensor) -> Tensor:
    return SCORES[ids[:, 0], ids[:, 1] if ids.shape[1] > 1 else 0]


def probabilities(table: Table, length: int) -> Tensor:
    return table.token_logprobs(completions(length)).detach().sum(-1).exp()


def tilted(reference: Tensor, rewards: Tensor) -> Tensor:
    weights = reference * (rewards / BETA).exp()
    return weights / weights.sum(-1, keepdim=True)


def state_by_state() -> Tensor:
    """What a KL per token in the loss leads to: each state weighs its own KL alone, not that of the states it leads to.

    The second token is ref * exp(r / beta); the first ref * exp(q / beta), q the mean reward that follows, where the
    optimum has beta * log of the mean of exp(r / beta) under the reference.
    """
    reference = REFERENCE.softmax(-1)
    second = tilted(reference[1:], SCORES)
    first = tilted(reference[0], (second * SCORES).sum(-1))
    return (first[:, None] * second).flatten()


def opponent(module: Any, length: int) -> Tensor:
    """Probabilities of what the second completion of a pair is drawn from: the mixture of policy and reference."""
    table, coef = Table(), module.mixture_coef
    table.logits.data = (1 - coef) * module.policy.logits.data + coef * REFERENCE
    return probabilities(table, length)


def sample(module: Any, length: int, num_rows: int, rng: torch.Generator) -> Batch:
    with torch.no_grad():
        chances = [probabilities(module.policy, length)] * module.group_size
        if module.reference_sample:
            chances[-1] = opponent(module, length)
        each = num_rows // module.group_size
        drawn = [torch.multinomial(chance, each, replacement=True, generator=rng) for chance in chances]
        ids = completions(length)[torch.stack(drawn, 1).flatten()]
        num_prompts = num_rows // module.group_size
        mask = torch.ones(ids.shape, dtype=torch.bool)
        prompts = torch.zeros(num_prompts, 1, dtype=torch.long)
        batch = Batch(prompts, prompts == 0, ids, mask, None, module.group_size)
        batch.finished, batch.rewards = torch.ones(num_rows, dtype=torch.bool), rewards_of(ids)
        batch.sampler_logprobs = module.policy.token_logprobs(ids)
        batch.from_reference = torch.arange(num_rows) % module.group_size == module.group_size - 1
    return batch


def preferences(batch: Batch, rng: torch.Generator) -> None:
    """In place of the rewards of a pair: 1 for the one that is preferred, drawn from Bradley-Terry, 0 for the other."""
    assert batch.rewards is not None
    first, second = batch.rewards.view(-1, 2).unbind(1)
    wins = (torch.rand(len(first), generator=rng) < torch.sigmoid(first - second)).float()
    batch.rewards = torch.stack([wins, 1 - wins], 1).flatten()


def cyclic() -> np.ndarray:
    """P(a is preferred to b), (9, 9): better rewards help, being up to four steps ahead on a circle more so."""
    rewards, place = rewards_of(completions(2)).double().numpy(), np.arange(9)
    ahead = np.sin(2 * np.pi * (place[:, None] - place) / 9)
    return 1 / (1 + np.exp(-(0.5 * (rewards[:, None] - rewards) + 3 * ahead)))


def judge(batch: Batch, rng: torch.Generator, *, drawn: bool) -> None:
    """In place of the rewards of a pair: two whose difference says how likely the first is preferred, in `cyclic`; or,
    drawn from it, 1 for the one that is preferred and 0 for the other."""
    numbers = (3 * batch.completion_ids[:, 0] + batch.completion_ids[:, 1]).view(-1, 2)
    chance = torch.from_numpy(cyclic())[numbers[:, 0], numbers[:, 1]].float()
    first = (torch.rand(len(chance), generator=rng) < chance).float() if drawn else chance.logit()
    batch.rewards = torch.stack([first, 1 - first if drawn else torch.zeros_like(first)], 1).flatten()


@pytest.fixture
def fixed_point(online, keys_of, learn):
    """fixed_point(Class, option, length, **changes) -> the policy's probabilities after training."""

    def train(algorithm: type, option: str, length: int, *, num_rows: int = NUM_ROWS, **changes: Any) -> Tensor:
        # Rows that are sampled; Nash-MD learns from half of them.
        keys = keys_of(option) | {"beta": BETA, "microbatch_size": num_rows, "group_size": 4} | changes
        keys["microbatch_size"] //= 2 if algorithm is NashMD else 1
        module = online(algorithm, **keys)
        module.policy, module.reference.model = Table(), Table().requires_grad_(False)
        module._score = lambda model, batch, **options: TokenScores(model.token_logprobs(batch.completion_ids))
        # Each answer to an opponent that answers is a turn around the equilibrium, which momentum keeps up.
        betas = (0.0 if algorithm is NashMD else 0.9, 0.999)
        optimizer = torch.optim.Adam(module.policy.parameters(), lr=0.1, betas=betas)
        rng, logits = torch.Generator().manual_seed(0), []
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 0.15 * (1 - step / STEPS)
            rollout = sample(module, length, num_rows, rng)
            if algorithm in (OnlineDPO, XPO):
                preferences(rollout, rng)
            if algorithm is NashMD:
                judge(rollout, rng, drawn=keys["preference"] == "win")
            learn(module, module.prepare_rollout(rollout))
            optimizer.step()
            logits.append(module.policy.logits.detach().clone())
        module.policy.logits.data = torch.stack(logits[STEPS // 2 :]).mean(0)  # less of the samples' noise
        return probabilities(module.policy, length)

    return train


def distance(a: Tensor, b: Tensor) -> float:
    return 0.5 * float((a - b).abs().sum())


def optimum(length: int, *, share: float = 1.0) -> Tensor:
    return tilted(probabilities(Table(), length), share * rewards_of(completions(length)))


@pytest.mark.parametrize(
    ("algorithm", "option", "changes"),
    [
        (GRPO, "grpo", {"scale_rewards": "leave_one_out", "kl": "reward"}),
        (RLOO, "rloo", {}),
        (RLOO, "rloo", {"loss": "reinforce"}),
        (RLOO, "rloo", {"loss": "sequence"}),
        (ReinforcePP, "reinforce_pp", {}),
        (OnlineDPO, "online_dpo", {"group_size": 2, "num_rows": 4096}),
    ],
    ids=["grpo", "rloo", "rloo-reinforce", "rloo-sequence", "reinforce_pp", "online_dpo"],
)
def test_it_ends_at_the_optimum(fixed_point, algorithm, option: str, changes: dict[str, Any]) -> None:
    """With the KL in the reward, or preferences drawn from Bradley-Terry, for completions of two tokens."""
    assert distance(probabilities(Table(), 2), optimum(2)) > 0.3  # where it starts
    within = 0.02 if algorithm is OnlineDPO else WITHIN  # preferences are noisier than rewards
    assert distance(fixed_point(algorithm, option, 2, **changes), optimum(2)) < within


@pytest.mark.parametrize("kl", ["k3_corrected", "k2", "k3_straight_through"])
def test_a_kl_per_token_in_the_loss_ends_at_the_optimum_of_one_token(fixed_point, kl: str) -> None:
    found = fixed_point(GRPO, "grpo", 1, scale_rewards="leave_one_out", kl=kl)
    assert distance(found, optimum(1)) < WITHIN


def test_for_more_tokens_it_ends_where_each_state_is_best_for_itself(fixed_point) -> None:
    found = fixed_point(GRPO, "grpo", 2, scale_rewards="leave_one_out")
    assert distance(found, state_by_state()) < WITHIN
    assert distance(optimum(2), state_by_state()) > 0.1


def test_unscaled_advantages_weigh_the_reward_a_little_less_than_the_kl(fixed_point) -> None:
    """r - mean holds r itself with weight 1 - 1/G: with G = 4 the KL counts as if beta were a third larger."""
    found = fixed_point(GRPO, "grpo", 1, scale_rewards="none")
    assert distance(found, optimum(1, share=0.75)) < WITHIN
    assert distance(optimum(1), optimum(1, share=0.75)) > 0.04


def test_scaling_by_the_deviation_forgets_the_size_of_the_rewards(fixed_point, monkeypatch) -> None:
    """Ten times the rewards is the same policy, and neither is the optimum of its own."""
    plain = fixed_point(GRPO, "grpo", 1, scale_rewards="group")
    assert distance(plain, optimum(1)) > 0.04
    monkeypatch.setitem(globals(), "SCORES", 10 * SCORES)
    assert distance(fixed_point(GRPO, "grpo", 1, scale_rewards="group"), plain) < WITHIN


# ---- preferences ---------------------------------------------------------------------------------------------------
def mixed(policy: np.ndarray, reference: np.ndarray, coef: float) -> np.ndarray:
    """The opponent of Nash-MD, (9,) from two of them: geometric means, normalised state by state."""
    p, q = policy.reshape(3, 3), reference.reshape(3, 3)
    first = p.sum(1) ** (1 - coef) * q.sum(1) ** coef
    second = (p / p.sum(1, keepdims=True)) ** (1 - coef) * (q / q.sum(1, keepdims=True)) ** coef
    return (first / first.sum() * (second / second.sum(1, keepdims=True)).T).T.flatten()


def equilibrium(beta: float, coef: float) -> Tensor:
    """p ~ reference * exp(P(. beats the mixture) / beta): iterated, half a step at a time, until it stands still."""
    reference = probabilities(Table(), 2).double().numpy()
    policy, before = reference, np.zeros(9)
    while np.abs(policy - before).max() > 1e-13:
        before = policy
        target = reference * np.exp(cyclic() @ mixed(policy, reference, coef) / beta)
        policy = np.sqrt(policy * target / target.sum())
        policy /= policy.sum()
    return torch.from_numpy(policy).float()


@pytest.mark.parametrize("coef", [0.0, 0.5, 1.0])
def test_nash_md_ends_at_its_equilibrium(fixed_point, coef: float) -> None:
    """Preferences that go in a circle, so that no reward explains them; the paper's equilibrium is that of coef 0."""
    wanted = equilibrium(0.2, coef)
    options = {"beta": 0.2, "mixture_coef": coef, "group_size": 2, "num_rows": 8192}
    assert distance(fixed_point(NashMD, "nash_md", 2, **options), wanted) < 0.01
    assert distance(probabilities(Table(), 2), wanted) > 0.1
    for other in {0.0, 0.5, 1.0} - {coef}:
        assert distance(equilibrium(0.2, other), wanted) > 0.07


def test_nash_md_of_wins_ends_there_too(fixed_point) -> None:
    options = {"beta": 0.2, "preference": "win", "group_size": 2, "num_rows": 16384}
    assert distance(fixed_point(NashMD, "nash_md", 2, **options), equilibrium(0.2, 0.5)) < 0.01


def test_the_equilibrium_is_one() -> None:
    """Against it nobody does better than itself, in preference less beta * KL; and preferences go in a circle."""
    p, beats = equilibrium(0.2, 0.0).double().numpy(), cyclic() > 0.5
    assert any(beats[a, b] and beats[b, c] and beats[c, a] for a in range(9) for b in range(9) for c in range(9))
    reference, win = probabilities(Table(), 2).double().numpy(), cyclic() @ p

    def worth(policy: np.ndarray) -> float:
        return float(policy @ win - 0.2 * policy @ np.log(policy / reference))

    rng = np.random.default_rng(0)
    for size in (1.0, 0.1, 0.01):
        for _ in range(200):
            other = p * np.exp(size * rng.standard_normal(9))
            assert worth(other / other.sum()) <= worth(p) + 1e-9


def xpo_end(beta: float, alpha: float) -> Tensor:
    """What minimises XPO's expected loss for samples of itself: for given samples, until it is what samples."""
    reference = probabilities(Table(), 2).double().numpy()
    rewards = rewards_of(completions(2)).double().numpy()
    wins = 1 / (1 + np.exp(-(rewards[:, None] - rewards)))

    def loss(logits: np.ndarray, sampler: np.ndarray) -> tuple[float, np.ndarray]:
        logp = logits - np.logaddexp.reduce(logits)
        ratio, chance = logp - np.log(reference), sampler[:, None] * reference
        margin = beta * (ratio[:, None] - ratio)
        pair = wins * np.logaddexp(0, -margin) + (1 - wins) * np.logaddexp(0, margin)
        slope = chance * beta * (1 / (1 + np.exp(-margin)) - wins)
        gradient = slope.sum(1) - slope.sum(0) + alpha * reference
        return float((chance * pair).sum() + alpha * reference @ logp), gradient - np.exp(logp) * gradient.sum()

    sampler, before = reference, np.zeros(9)
    while np.abs(sampler - before).max() > 1e-7:
        before = sampler
        logits = minimize(loss, np.log(sampler), args=(sampler,), jac=True, tol=1e-10).x
        sampler = np.exp(logits - np.logaddexp.reduce(logits))
    return torch.from_numpy(sampler).float()


def test_xpo_ends_at_its_own_fixed_point(fixed_point) -> None:
    """Without the bonus that is the optimum; with it, away from what the reference says. The bonus has no lower bound:
    with twice this alpha there is no fixed point, all mass goes to one completion."""
    assert distance(xpo_end(BETA, 0.0), optimum(2)) < 1e-4
    wanted = xpo_end(BETA, 0.01)
    assert distance(wanted, optimum(2)) > 0.04
    options = {"alpha": 0.01, "group_size": 2, "num_rows": 16384}
    assert distance(fixed_point(XPO, "xpo", 2, **options), wanted) < 0.01
