"""RAFT learns the best samples of each prompt, and only them."""

from __future__ import annotations

import math

import pytest
import torch

from alignment.algorithm.raft import RAFT
from alignment.errors import UserError

LENGTHS = [[3, 5, 1], [2, 6, 4], [4, 2, 3]]
REWARDS = [0.0, 1.0, 0.5, 0.25, math.nan, 0.25, 0.1, 0.2, 0.0]


@pytest.mark.parametrize(
    ("kept", "threshold", "learned"),
    [
        (1, None, [1, 3, 7]),  # of equals the first
        (2, None, [1, 2, 3, 5, 7, 6]),
        (3, None, [1, 2, 0, 3, 5, 7, 6, 8]),  # 4 has no score
        (2, 0.25, [1, 2, 3, 5]),  # the third prompt's best is below
    ],
)
def test_the_loss_is_the_nll_of_the_best(online, keys_of, rollout_of, learn, tokens, kept, threshold, learned) -> None:
    results = []
    for size in (3 * kept, kept, 1):
        changes = {"num_kept": kept, "threshold": threshold, "microbatch_size": size, "num_prompts": 3}
        module = online(RAFT, group_size=3, **(keys_of("raft") | changes))
        assert module.num_learned == kept
        rollout = rollout_of(LENGTHS, REWARDS)
        rows = tokens(module.policy, rollout)
        batches = module.prepare_rollout(rollout)
        assert sum(len(batch) for batch in batches) == 3 * kept  # what is not kept is not computed
        results.append(learn(module, batches))
    expected = -sum(sum(rows[n]) for n in learned) / sum(len(rows[n]) for n in learned)
    for value, gradient, metrics in results:
        assert value == pytest.approx(expected, rel=1e-4)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-6)
        assert metrics["rollout/kept"] == pytest.approx(len(learned) / (3 * kept))
        mean = sum(REWARDS[n] for n in learned) / len(learned)
        assert metrics["rollout/kept_reward"] == pytest.approx(mean)


@pytest.mark.parametrize("kept", [0, 4])
def test_it_cannot_keep_more_than_there_are(online, keys_of, kept: int) -> None:
    with pytest.raises(UserError, match=rf"algorithm\.num_kept: {kept} of 3 samples"):
        online(RAFT, group_size=3, **(keys_of("raft") | {"num_kept": kept}))
