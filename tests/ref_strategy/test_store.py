"""The reference cache never gives a wrong number: it gives the stored one, or nothing."""

import os
import threading

import pytest
import torch
from torch import nn

from alignment.batch import Example
from alignment.ref_strategy.store import LogprobStore, example_key, fingerprint

KEY = {"weights": "w", "precision": "32-true"}


def example(*tokens: int, completions=((7, 2), (9, 2))) -> Example:
    return Example(list(tokens), [list(ids) for ids in completions])


def test_what_is_written_is_read_by_key(tmp_path):
    store = LogprobStore(str(tmp_path), KEY)
    values = {example_key(example(i)): torch.arange(float(i)) for i in range(1, 4)}
    store.write(values)
    wanted = list(values)[:2]
    found = LogprobStore(str(tmp_path), KEY).read(wanted)
    assert {key: value.tolist() for key, value in found.items()} == {k: values[k].tolist() for k in wanted}


def test_shards_of_several_runs_add_up(tmp_path):
    store = LogprobStore(str(tmp_path), KEY)
    first, second = example_key(example(1)), example_key(example(2))
    store.write({first: torch.ones(2)})
    store.write({second: torch.zeros(3)})
    assert set(store.read([first, second])) == {first, second}


@pytest.mark.parametrize(
    "other", [{"weights": "v", "precision": "32-true"}, {"weights": "w", "precision": "bf16-mixed"}]
)
def test_other_weights_or_another_number_format_find_nothing(tmp_path, other):
    LogprobStore(str(tmp_path), KEY).write({example_key(example(1)): torch.ones(2)})
    assert LogprobStore(str(tmp_path), other).read([example_key(example(1))]) == {}


def test_one_changed_token_is_another_example():
    keys = {
        example_key(example(5, 6)),
        example_key(example(5, 7)),
        example_key(example(5, 6, completions=((7, 2), (9, 3)))),
        example_key(example(5, 6, completions=((7,), (2, 9, 2)))),  # the same tokens, another boundary
        example_key(example(5, completions=((6, 7, 2), (9, 2)))),
    }
    assert len(keys) == 5
    assert example_key(example(5, 6)) == example_key(Example([5, 6], [[7, 2], [9, 2]], columns={"a": 1}, id="x"))


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_shard_is_dropped_and_the_others_are_kept(tmp_path, damage, caplog):
    store = LogprobStore(str(tmp_path), KEY)
    store.write({example_key(example(1)): torch.ones(2)})
    store.write({example_key(example(2)): torch.ones(2)})
    victim = sorted(store.folder.glob("*.shard"))[0]
    content = bytearray(victim.read_bytes())
    if damage == "flip":
        content[-1] ^= 1
    victim.write_bytes(b"" if damage == "empty" else bytes(content) if damage == "flip" else bytes(content[:-8]))
    found = store.read([example_key(example(1)), example_key(example(2))])
    assert len(found) == 1
    assert all(value.tolist() == [1, 1] for value in found.values())
    assert "damaged" in caplog.text
    assert not victim.exists()


def test_a_full_disk_is_told_and_leaves_nothing_half_written(tmp_path, monkeypatch, caplog):
    store = LogprobStore(str(tmp_path), KEY)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    store.write({example_key(example(1)): torch.ones(2)})
    assert "No space left" in caplog.text
    assert not list(store.folder.glob("*.shard"))
    assert not list(store.folder.glob("*.partial"))


def test_two_writers_at_once_lose_nothing(tmp_path):
    keys = [example_key(example(i)) for i in range(20)]

    def write(part):
        store = LogprobStore(str(tmp_path), KEY)
        for key in part:
            store.write({key: torch.full((3,), float(keys.index(key)))})

    threads = [threading.Thread(target=write, args=(keys[i::2],)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = LogprobStore(str(tmp_path), KEY).read(keys)
    assert [found[key][0].item() for key in keys] == list(range(20))


def test_the_lock_makes_a_second_job_wait(tmp_path):
    store = LogprobStore(str(tmp_path), KEY)
    with store.lock(), pytest.raises(TimeoutError):
        LogprobStore(str(tmp_path), KEY).lock().acquire(timeout=0.05)


def test_the_fingerprint_follows_the_weights_not_their_name():
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    before = fingerprint(model)
    assert fingerprint(model) == before
    with torch.no_grad():
        model.weight[0, 0] += 1e-6
    assert fingerprint(model) != before
    assert fingerprint(model.half()) != fingerprint(model.float())
