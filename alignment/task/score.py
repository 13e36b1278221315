"""`task=score`: any combination of rewards on completions that are there already, in a file."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from alignment.config import build
from alignment.data import files
from alignment.data.messages import RowProblem
from alignment.data.schema import shortened
from alignment.errors import UserError
from alignment.reward.combine import RewardSet

log = logging.getLogger("alignment")


@dataclass
class Scored:
    """One row of the file and its completions as text; a list in the row stays a list in the result."""

    row: dict[str, Any]
    completions: list[str]
    is_list: bool


def run(cfg: dict[str, Any], *, path: str, batch_size: int) -> dict[str, Any]:
    """Score every row of `path` with the rewards of the config; writes scored.jsonl, returns the means.

    A row has `completion` (text or messages) or `completions` (a list of them), and whatever the rewards read. It is
    written again with `score` (or `scores`) and `rewards`, each reward's own; null = could not be scored.
    """
    rewards = RewardSet({name: (reward := build(node), reward.weight) for name, node in cfg["reward"].items()})
    folder = Path(cfg["output_dir"])
    _check(path)
    totals: dict[str, list[float]] = {"score": []} | {name: [] for name in rewards.rewards}
    count = 0
    rows = _rows(path)
    try:
        with open(folder / "scored.jsonl", "w", encoding="utf-8") as file, tqdm(desc="score", unit=" rows") as bar:
            while batch := list(islice(rows, batch_size)):
                for line in _score(batch, rewards, totals):
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                count += sum(len(item.completions) for item in batch)
                bar.update(len(batch))
    finally:
        rewards.close()
    return _told(totals, count, rewards, folder)


def _check(path: str) -> None:
    """UserError with every row that cannot be scored: nothing is scored before all can be."""
    problems, rows = [], 0
    for file in files.find(path, "task.path"):
        for where, row in files.read(file):
            rows += 1
            try:
                _scored(row)
            except RowProblem as problem:
                problems.append(f"{where}: {problem}")
    if problems:
        lines = "\n".join(f"  - {line}" for line in shortened(problems))
        raise UserError(f"{len(problems)} of {rows} rows cannot be scored:\n{lines}")
    if not rows:
        raise UserError(f"task.path: {path} has no rows: type task.path=<file, folder or glob>")


def _rows(path: str) -> Iterator[Scored]:
    for file in files.find(path, "task.path"):
        yield from (_scored(row) for _, row in files.read(file))


def _scored(row: dict[str, Any] | RowProblem) -> Scored:
    if isinstance(row, RowProblem):
        raise row
    if "completions" in row:
        if not isinstance(row["completions"], list) or not row["completions"]:
            raise RowProblem("completions", "is no list of completions", "make it a list of texts")
        return Scored(row, [_text(item, "completions") for item in row["completions"]], True)
    if "completion" not in row:
        raise RowProblem("completion", "is missing", "name what is scored `completion` or `completions`")
    return Scored(row, [_text(row["completion"], "completion")], False)


def _text(value: Any, field: str) -> str:
    """A completion's text; of messages, all that the assistant says."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("content"), str) for turn in value
    ):
        return "\n".join(turn["content"] for turn in value if turn.get("role") == "assistant")
    raise RowProblem(field, "is neither text nor messages", "write it as text")


def _score(batch: list[Scored], rewards: RewardSet, totals: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    texts = [text for item in batch for text in item.completions]
    scores = rewards(texts, [item.row for item in batch for _ in item.completions])
    for name, values in (("score", scores.total), *scores.parts.items()):
        totals[name] += [value for value in values if value is not None]
    start = 0
    for item in batch:
        end = start + len(item.completions)
        parts = {name: values[start:end] for name, values in scores.parts.items()}
        if item.is_list:
            yield item.row | {"scores": scores.total[start:end], "rewards": parts}
        else:
            yield item.row | {"score": scores.total[start], "rewards": {name: part[0] for name, part in parts.items()}}
        start = end


def _told(totals: dict[str, list[float]], count: int, rewards: RewardSet, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, values in totals.items():
        found |= {name: statistics.fmean(values) if values else None, f"{name}/unscorable": count - len(values)}
        shown = f"mean {statistics.fmean(values):.4f}" if values else "nothing could be scored"
        log.info("%-20s %s, %d of %d completions scored", name, shown, len(values), count)
    found |= {f"reward/{name}": number for name, number in rewards.counters.items() if number}
    (folder / "summary.json").write_text(json.dumps(found | {"completions": count}, indent=2) + "\n", encoding="utf-8")
    log.info("scored.jsonl is in %s", folder)
    return found | {"completions": count, "output_dir": str(folder)}
