import itertools
from types import SimpleNamespace

import pytest

from alignment.batch import Example
from alignment.data.datamodule import FromStep, OnlineData, RolloutBuffer, StepStream, Stream


def rows(count: int) -> list[Example]:
    return [Example([1] * (1 + i % 5), [[2] * (1 + i % 7)], id=str(i)) for i in range(count)]


def steps(**changes) -> StepStream:
    settings = {"batch_size": 4, "microbatch_size": 1, "total_steps": 6, "rank": 0, "world_size": 1, "seed": 3}
    return StepStream(rows(10), **(settings | changes))


def ids(stream: StepStream, indices) -> list[str]:
    return [example.id for i in indices for example in stream[i].examples]


def test_a_pass_visits_every_row_once_and_the_next_one_in_another_order():
    stream = Stream(10, seed=0)
    first, second = stream.take(0, 10), stream.take(10, 10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert stream.take(8, 4) == first[8:] + second[:2]


def test_the_stream_is_a_function_of_seed_and_position_alone():
    assert Stream(50, seed=1).take(120, 7) == Stream(50, seed=1).take(0, 200)[120:127]
    assert Stream(50, seed=1).take(0, 50) != Stream(50, seed=2).take(0, 50)


def test_steps_run_over_the_end_of_a_pass_so_no_row_is_dropped():
    stream = steps()
    seen = ids(stream, range(len(stream)))
    assert len(seen) == 24
    assert sorted(set(seen[:12]) | set(seen[8:20])) == sorted(map(str, range(10)))


@pytest.mark.parametrize("microbatch_size", [1, 2, 4])
def test_a_step_holds_the_same_rows_whatever_the_microbatch(microbatch_size: int):
    reference, other = steps(), steps(microbatch_size=microbatch_size)
    per_step = 4 // microbatch_size
    for step in range(6):
        assert ids(reference, range(step * 4, step * 4 + 4)) == ids(
            other, range(step * per_step, (step + 1) * per_step)
        )


def lengths(stream: StepStream, step: int) -> list[int]:
    return [len(row.prompt_ids) + len(row.completions[0]) for row in stream.rows(step)]


@pytest.mark.parametrize("window", [2, 4, 6, 100])
def test_a_length_window_holds_the_same_rows_in_steps_of_similar_length(window: int):
    plain, grouped = steps(), steps(length_window=window)
    for first in range(0, 6, window):
        mine = range(first, min(first + window, 6))  # the last window is what is left of the run
        rows_of = [sorted(example.id for step in mine for example in stream.rows(step)) for stream in (plain, grouped)]
        assert rows_of[0] == rows_of[1]
        spans = sorted((min(lengths(grouped, step)), max(lengths(grouped, step))) for step in mine)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_the_steps_of_a_length_window_are_a_function_of_seed_and_step_in_no_order_of_length():
    def run(seed: int, order=range(40)) -> list[list[str]]:
        stream = steps(length_window=20, total_steps=40, seed=seed)
        return [[row.id for row in stream.rows(step)] for step in order]

    whole = run(1)
    assert run(1, [27, 3, 39]) == [whole[27], whole[3], whole[39]]  # as a resumed run asks
    assert run(2) != whole
    stream = steps(length_window=20, total_steps=40)
    longest = [max(lengths(stream, step)) for step in range(20)]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


def test_ranks_and_microbatches_of_a_length_window_are_those_of_its_steps():
    whole = steps(length_window=3)
    parts = [steps(length_window=3, rank=rank, world_size=2) for rank in (0, 1)]
    for step in range(6):
        expected = [row.id for row in whole.rows(step)]
        assert ids(whole, range(4 * step, 4 * step + 4)) == expected
        assert sorted(ids(parts[0], range(2 * step, 2 * step + 2)) + ids(parts[1], range(2 * step, 2 * step + 2))) == (
            sorted(expected)
        )
        assert whole[4 * step].step_tokens == sum(len(row.completions[0]) for row in whole.rows(step))


def test_ranks_share_a_step_without_overlap():
    whole = set(ids(steps(), range(4)))
    ranks = [set(ids(steps(rank=rank, world_size=2), range(2))) for rank in (0, 1)]
    assert ranks[0] | ranks[1] == whole
    assert not ranks[0] & ranks[1]


def test_every_microbatch_knows_the_tokens_of_its_whole_step():
    stream = steps(rank=1, world_size=2)
    for step in range(6):
        expected = sum(1 + i % 7 for i in stream.stream.take(step * 4, 4))  # the lengths of the rows' completions
        assert [stream[i].step_tokens for i in (2 * step, 2 * step + 1)] == [expected, expected]
        assert stream[2 * step].step_examples == 4


def test_the_sampler_goes_on_at_the_trainers_step():
    stream = steps(microbatch_size=2)
    sampler = FromStep(stream, SimpleNamespace(global_step=4))
    assert list(sampler) == [8, 9, 10, 11]
    assert len(sampler) == 12  # the length stays that of the whole run: Lightning counts batches of the epoch


def online(rank: int = 0, world_size: int = 1) -> OnlineData:
    data = OnlineData(rows(10), [], num_prompts=4, num_microbatches=2, num_iterations=2, eval_batch_size=8, seed=0)
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
    return data


def test_no_prompt_comes_twice_before_all_have_come_once():
    data = online()
    seen = [example.id for rollout in range(5) for example in data.prompts_for(rollout)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == sorted(map(str, range(10)))


def test_ranks_take_different_prompts_of_the_same_rollout():
    parts = [[example.id for example in online(rank, 2).prompts_for(3)] for rank in (0, 1)]
    assert sorted(parts[0] + parts[1]) == sorted(example.id for example in online().prompts_for(3))


def test_the_loader_repeats_the_rollout_num_iterations_times():
    data = online()
    batches = ["a", "b"]
    data.rollouts.fill(batches, "ab")
    assert list(data.train_dataloader()) == ["a", "b", "a", "b"]


def test_a_rollout_of_the_wrong_size_is_an_error():
    with pytest.raises(RuntimeError, match="2 were planned"):
        RolloutBuffer(2).fill(["a"], "a")
