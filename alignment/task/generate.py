"""`task=generate`: sample the model on the prompts of the data, score what it says, keep what is worth learning."""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from tqdm import tqdm

from alignment.batch import Batch
from alignment.experiment.record import plain, write_summary
from alignment.reward.combine import Scores, rows_of
from alignment.task.inference import Inference, build_rewards, inference_problems, prompts

log = logging.getLogger("alignment")
Line = dict[str, Any]


def run(
    cfg: dict[str, Any],
    *,
    split: Literal["train", "heldout"],
    num_prompts: int | None,
    num_samples: int,
    batch_size: int,
    keep: Literal["best", "passing"] | None,
    min_score: float | None,
) -> dict[str, Any]:
    """generated.jsonl: each prompt's row with `completions`, `finished`, and `scores` and `rewards` where rewards are
    chosen. kept.jsonl: what `keep` leaves, a row for each completion, to train on with data=jsonl. Returns means.

    keep: "best" is the highest score of each prompt (best-of-n), "passing" all; where there is a `min_score`, of those
    that score so much or more. Both leave out completions that were cut at the length limit, which have no end to
    learn, and the same text twice.
    """
    folder, totals = Path(cfg["output_dir"]), Totals()
    with contextlib.ExitStack() as stack:
        rewards = stack.enter_context(contextlib.closing(build_rewards(cfg)))
        model = Inference(cfg)
        examples = prompts(cfg, model.source, split, num_prompts)
        generated = stack.enter_context(open(folder / "generated.jsonl", "w", encoding="utf-8"))
        kept = stack.enter_context(open(folder / "kept.jsonl", "w", encoding="utf-8")) if keep else None
        bar = stack.enter_context(tqdm(total=len(examples) * num_samples, desc="generate", unit=" completions"))
        for number, start in enumerate(range(0, len(examples), batch_size)):
            batch = model.complete(examples[start : start + batch_size], num_samples, number=number)
            scores = rewards(batch.texts, rows_of(batch), group_size=batch.group_size) if rewards.rewards else None
            totals.add(batch, scores)
            for line in _lines(batch, scores):
                _write(generated, line)
                for chosen in _kept(line, keep, min_score):
                    assert kept is not None
                    _write(kept, chosen)
                    totals.num_kept += 1
            bar.update(len(batch))
    found = totals.found(keep) | {f"reward/{name}": count for name, count in rewards.counters.items() if count}
    write_summary(folder, found)
    for name, value in found.items():
        log.info("%-24s %s", name, f"{value:.4f}" if isinstance(value, float) else value)
    log.info("%s in %s", "generated.jsonl and kept.jsonl are" if keep else "generated.jsonl is", folder)
    return found | {"output_dir": str(folder)}


def problems(cfg: dict[str, Any]) -> list[str]:
    """What can be said before the model loads."""
    keep = cfg["task"]["keep"]
    why = f"task.keep: {keep} goes by scores and there is no reward: type reward=accuracy, or task.keep=null"
    return inference_problems(cfg) + ([why] if keep and not cfg["reward"] else [])


def _write(file: TextIO, line: Line) -> None:
    """At once, so that what was sampled before an interruption is there."""
    file.write(json.dumps(plain(line, file.name), ensure_ascii=False) + "\n")
    file.flush()


def _lines(batch: Batch, scores: Scores | None) -> Iterator[Line]:
    size = batch.group_size
    assert batch.finished is not None
    for i, example in enumerate(batch.examples):
        part = slice(i * size, (i + 1) * size)
        line = example.columns | {"completions": batch.texts[part], "finished": batch.finished[part].tolist()}
        if scores is not None:
            line["scores"] = scores.total[part]
            line["rewards"] = {name: values[part] for name, values in scores.parts.items()}
        yield line


def _kept(line: Line, keep: str | None, min_score: float | None) -> Iterator[Line]:
    if keep is None:
        return
    rest = {key: value for key, value in line.items() if key not in ("completions", "finished", "scores", "rewards")}
    found: dict[str, float] = {}
    for text, finished, score in zip(line["completions"], line["finished"], line["scores"], strict=True):
        if finished and text.strip() and score is not None:
            found.setdefault(text, score)
    passing = {text: score for text, score in found.items() if min_score is None or score >= min_score}
    chosen = [max(passing, key=passing.__getitem__)] if passing and keep == "best" else list(passing)
    for text in chosen:
        yield rest | {"completion": text, "score": passing[text]}


class Totals:
    """What is told at the end."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.finished: list[bool] = []
        self.scores: dict[str, list[float]] = defaultdict(list)
        self.solved: dict[str, list[float]] = defaultdict(list)
        self.num_prompts = self.num_kept = 0
        self.started = time.perf_counter()

    def add(self, batch: Batch, scores: Scores | None) -> None:
        assert batch.finished is not None
        self.num_prompts += len(batch.examples)
        self.lengths += batch.completion_mask.sum(-1).tolist()
        self.finished += batch.finished.tolist()
        if scores is None:
            return
        size = batch.group_size
        for name, values in (("reward", scores.total), *scores.parts.items()):
            self.scores[name] += [value for value in values if value is not None]
            for start in range(0, len(values), size):
                if size > 1 and None not in (group := values[start : start + size]):
                    self.solved[f"{name}_pass@{size}"].append(float(1.0 in group))

    def found(self, keep: str | None) -> dict[str, float]:
        seconds = time.perf_counter() - self.started
        numbers: dict[str, float] = {"prompts": self.num_prompts, "completions": len(self.lengths)}
        numbers |= {
            name: statistics.fmean(values) for name, values in (*self.scores.items(), *self.solved.items()) if values
        }
        numbers |= {"length": statistics.fmean(self.lengths), "finished": statistics.fmean(self.finished)}
        numbers |= {"tokens_per_second": sum(self.lengths) / seconds, "seconds": seconds}
        return numbers | ({"kept": self.num_kept} if keep else {})
