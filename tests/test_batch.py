import pytest
import torch

from alignment.batch import Batch, Example, collate, pad


def pairs() -> list[Example]:
    return [
        Example([5, 6], [[7, 2], [8, 9, 2]], columns={"answer": "a"}, id="x"),
        Example([4], [[3, 3, 3, 2], [2]], loss_masks=[[False, True, True, True], [True]], id="y"),
    ]


def test_collate_pads_prompts_left_and_completions_right():
    batch = collate(pairs())
    assert batch.prompt_ids.tolist() == [[5, 6], [0, 4]]
    assert batch.prompt_mask.tolist() == [[True, True], [False, True]]
    assert batch.completion_ids.tolist() == [[7, 2, 0, 0], [8, 9, 2, 0], [3, 3, 3, 2], [2, 0, 0, 0]]
    assert batch.completion_mask.sum(-1).tolist() == [2, 3, 4, 1]
    assert (len(batch), batch.group_size, batch.step_examples) == (4, 2, 2.0)


def test_loss_mask_covers_only_what_counts():
    batch = collate(pairs())
    assert batch.loss_mask.tolist()[2] == [False, True, True, True]
    assert batch.step_tokens == 2 + 3 + 3 + 1


def test_masks_come_from_lengths_when_pad_equals_eos():
    # pad id 0 stands in the sequences as a real token: 5 real tokens in all (B04)
    _, mask = pad([[5, 6, 0], [7, 0]])
    assert mask.tolist() == [[True, True, True], [True, True, False]]


def test_an_empty_completion_keeps_its_row():
    ids, mask = pad([[], []])
    assert ids.shape == (2, 1)
    assert not mask.any()


def test_unequal_groups_are_refused():
    with pytest.raises(ValueError, match="equally many"):
        collate([Example([1], [[2]]), Example([1], [[2], [3]])])


@pytest.mark.parametrize(("size", "groups"), [(4, [2]), (2, [2, 2]), (1, [1, 1, 1, 1])])
def test_split_keeps_rows_with_their_prompts(size: int, groups: list[int]):
    whole = collate(pairs())
    whole.rewards = torch.arange(4.0)
    whole.parts = {"accuracy": torch.arange(4.0) * 10}
    whole.texts = ["a", "b", "c", "d"]
    parts = whole.split(size)
    assert [part.group_size for part in parts] == groups
    assert torch.cat([part.completion_ids for part in parts]).tolist() == whole.completion_ids.tolist()
    assert torch.cat([part.rewards for part in parts]).tolist() == [0, 1, 2, 3]
    assert torch.cat([part.parts["accuracy"] for part in parts]).tolist() == [0, 10, 20, 30]
    assert [text for part in parts for text in part.texts] == whole.texts
    for part in parts:
        assert len(part.prompt_ids) == len(part.examples) == len(part) // part.group_size
    assert parts[-1].examples[0].id == ("y" if size < 4 else "x")


def test_a_split_across_groups_is_refused_with_the_sizes_that_work():
    with pytest.raises(ValueError, match="multiple or a divisor of 2"):
        collate(pairs()).split(3)


def test_to_moves_every_tensor_and_keeps_identity():
    batch = collate(pairs())
    batch.parts = {"format": torch.ones(4)}
    moved = batch.to("meta")
    assert moved is batch
    assert batch.completion_ids.device.type == batch.parts["format"].device.type == "meta"


def test_lightning_leaves_the_batch_alone():
    """Float32 fields stay float32 under a 16-bit precision plugin, and the object stays the same object."""
    from lightning.pytorch.plugins.precision import HalfPrecision

    batch: Batch = collate(pairs())
    batch.advantages = torch.ones(4)
    converted = HalfPrecision("bf16-true").convert_input(batch)
    assert converted is batch
    assert batch.advantages.dtype == torch.float32


def test_select_takes_some_completions_of_each_prompt() -> None:
    batch = collate([Example([7], [[1], [2, 2], [3]]), Example([8, 9], [[4], [5], [6, 6]])])
    batch.rewards, batch.texts = torch.arange(6.0), list("abcdef")
    batch.parts = {"x": torch.arange(6.0) * 10}
    part = batch.select(torch.tensor([[1, 0], [5, 5]]))
    assert part.group_size == 2
    assert part.completion_ids.tolist() == [[2, 2], [1, 0], [6, 6], [6, 6]]
    assert part.completion_mask.sum(-1).tolist() == [2, 1, 2, 2]
    assert part.prompt_ids.tolist() == batch.prompt_ids.tolist()
    assert part.rewards is not None
    assert (part.rewards.tolist(), part.texts) == ([1, 0, 5, 5], ["b", "a", "f", "f"])
    assert part.parts["x"].tolist() == [10, 0, 50, 50]
    assert batch.group_size == 3  # the whole stays as it was
    assert [len(half) for half in part.split(2)] == [2, 2]
