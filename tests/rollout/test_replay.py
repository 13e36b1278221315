"""What a replay buffer keeps, gives back, and repeats after a checkpoint."""

from __future__ import annotations

import io

import torch

from alignment.batch import Batch, Example, collate
from alignment.rollout.replay import ReplayBuffer


def rollout(start: int, *rewards: tuple[float, float]) -> Batch:
    """Prompts start, start + 1, ...: prompt p is p + 1 tokens long, both of its completions are p + 2 tokens, all p."""
    numbers = range(start, start + len(rewards))
    batch = collate([Example([9] * (p + 1), [[p] * (p + 2)] * 2, None, {"row": p}, str(p)) for p in numbers])
    batch.rewards = torch.tensor([float(reward) for group in rewards for reward in group])
    batch.advantages = batch.rewards - batch.rewards.view(-1, 2).mean(1).repeat_interleave(2)
    batch.old_logprobs = -(batch.completion_ids + 1.0) * batch.completion_mask
    batch.texts, batch.parts = ["text"] * len(batch), {"part": batch.rewards}
    return batch


def prompts(batch: Batch) -> list[int]:
    """Which prompts a batch holds, by their completions; every field must be that prompt's own."""
    found = batch.completion_ids[:, 0].tolist()[::2]
    for n, p in enumerate(batch.completion_ids[:, 0].tolist()):
        assert batch.old_logprobs is not None
        assert batch.completion_mask[n].sum() == p + 2
        assert batch.prompt_mask[n // 2].sum() == p + 1
        assert len(batch.examples[n // 2].prompt_ids) == p + 1
        torch.testing.assert_close(batch.old_logprobs[n], -(p + 1.0) * batch.completion_mask[n])
    return found


def test_groups_of_equal_rewards_give_way_to_earlier_ones() -> None:
    buffer = ReplayBuffer(8)
    first, num_replayed = buffer.refill(rollout(0, (0, 1), (1, 1), (0, 3)))
    assert (prompts(first), num_replayed) == ([0, 1, 2], 0)  # nothing to give yet
    second, num_replayed = buffer.refill(rollout(3, (2, 2), (0, 1)))
    assert (prompts(second), num_replayed) == ([4, 2], 1)  # 2 differs more than 0
    assert second.rewards is not None and second.advantages is not None
    assert second.rewards.tolist() == [0, 1, 0, 3] and second.advantages.tolist() == [-0.5, 0.5, -1.5, 1.5]
    # 2 was replayed once, so the others come first; 4 is newer than 0 and differs as much.
    third, num_replayed = buffer.refill(rollout(5, (1, 1), (1, 1), (1, 1), (1, 1)))
    assert (prompts(third), num_replayed) == ([8, 4, 0, 2], 3)


def test_only_the_newest_are_kept() -> None:
    buffer = ReplayBuffer(1)
    buffer.refill(rollout(0, (0, 9), (0, 1)))
    assert prompts(buffer.refill(rollout(2, (1, 1), (1, 1)))[0]) == [3, 1]


def test_unscorable_completions_do_not_count_as_differing() -> None:
    buffer, nan = ReplayBuffer(4), float("nan")
    buffer.refill(rollout(0, (0, nan), (nan, nan), (0, 1)))
    assert [group.completion_ids[0, 0] for group, _ in buffer.groups] == [2]


def test_a_checkpoint_holds_plain_values_and_the_same_choice_follows() -> None:
    buffer, resumed, file = ReplayBuffer(4), ReplayBuffer(4), io.BytesIO()
    buffer.refill(rollout(0, (0, 1), (0, 2), (1, 1)))
    buffer.refill(rollout(3, (1, 1)))
    torch.save(buffer.state(), file)
    resumed.load(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    one, other = (each.refill(rollout(4, (1, 1), (1, 1)))[0] for each in (buffer, resumed))
    assert prompts(one) == prompts(other) == [0, 1]
    for name, value in vars(one).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(getattr(other, name), value, rtol=0, atol=0)
