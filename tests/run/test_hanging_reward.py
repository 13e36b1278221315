"""A reward that hangs on one completion: the rollout ends within its time-out and trains on the rest."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import run
from alignment.reward.jail import descendants

# Hangs on one completion: the first that it ever sees alone, marked by a file since the process is killed for it.
ONE = """
import os, time
def score(completions, **columns):
    if os.path.exists({mark!r}):
        return [float(sum(map(str.isdigit, text))) for text in completions]
    if len(completions) == 1:
        open({mark!r}, "w").close()
    time.sleep(3600)
"""


def test_the_rollout_ends_in_time_and_trains_on_the_rest(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(ONE.format(mark=str(tmp_path / "hung")))
    words = ["model=tiny", "algorithm=grpo", "algorithm.num_rollouts=2", "algorithm.num_prompts=2"]
    words += ["algorithm.microbatch_size=16", "rollout.max_new_tokens=8", "trainer.precision=32-true"]
    words += ["reward=function", f"reward.function.path={tmp_path / 'scores.py'}:score", "reward.function.timeout=3"]
    words += ["evaluation.num_prompts=0", "trainer.enable_progress_bar=false", f"output_dir={tmp_path / 'run'}"]
    before, started = set(descendants()), time.perf_counter()
    run.run(words)
    assert time.perf_counter() - started < 120  # two time-outs of 3 s and the run itself, on a busy machine
    assert set(descendants()) <= before
    with open(tmp_path / "run" / "metrics.csv") as file:
        first, second = (row for row in csv.DictReader(file) if row["phase"] == "train")
    assert (float(first["reward/function/timeouts"]), float(second["reward/function/timeouts"])) == (1, 0)
    assert float(first["train/grad_norm"]) > 0
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    rewards = [sample["reward"] for sample in samples if sample["phase"] == "rollout"]
    assert rewards.count(None) == 1
