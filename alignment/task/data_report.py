"""`task=data_report`: what the rows of a run are like, without training. `task=fit` writes the same at its start."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from alignment.batch import Example
from alignment.config import build
from alignment.data.prepare import prepare
from alignment.data.report import as_text, data_report, shown_example
from alignment.errors import UserError
from alignment.experiment.lengths import draw_lengths
from alignment.experiment.record import plain
from alignment.rules import says

log = logging.getLogger("alignment")


def run(cfg: dict[str, Any], *, example: int) -> dict[str, Any]:
    """Load, clean and tokenise as the chosen algorithm would; report, and show one training example in colour."""
    transformers.utils.logging.disable_progress_bar()
    source, online = build(cfg["model"]), says(cfg, "algorithm", "online", False)
    prepared = prepare(
        build(cfg["data"]),
        says(cfg, "algorithm", "data_form", "prompts"),
        source,
        num_prompts=cfg["evaluation"]["num_prompts"] if says(cfg, "algorithm", "samples", True) else 0,
        with_heldout=not online,
        encoding=cfg["encoding"],
        cleaning=cfg["cleaning"],
    )
    if not 0 <= example < len(prepared.train):
        raise UserError(f"task.example: {example} of {len(prepared.train)} examples: type task.example=0")
    sets = {name: getattr(prepared, name) for name in prepared.reports}
    folder = Path(cfg["output_dir"])
    report = write_data_report(sets, prepared.reports, source.tokenizer, folder, example=example)
    print(shown_example(prepared.train[example], report["form"], source.tokenizer, colour=sys.stdout.isatty()))
    log.info("data_report.json, .txt and .png are in %s", folder)
    numbers = {f"{name}/examples": part["examples"] for name, part in report["sets"].items()}
    return numbers | {"warnings": len(report["warnings"]), "output_dir": str(folder)}


def write_data_report(
    sets: Mapping[str, Sequence[Example]],
    summaries: Mapping[str, Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    example: int = 0,
) -> dict[str, Any]:
    """data_report.json, .txt and .png, and the same in the log. `sets` by name, train among them."""
    summaries = {name: dict(summary) for name, summary in summaries.items()}
    report = data_report({name: sets[name] for name in ("train", *sorted(set(sets) - {"train"}))}, summaries)
    text = as_text(report)
    shown = shown_example(sets["train"][example], report["form"], tokenizer, colour=False)
    (folder / "data_report.txt").write_text(
        f"{text}\n\nexample {example}, learned between [[ and ]]:\n{shown}\n", "utf-8", "replace"
    )
    content = json.dumps(plain(report, "data report", finite=True), indent=2, ensure_ascii=False) + "\n"
    (folder / "data_report.json").write_text(content, encoding="utf-8", errors="replace")
    draw_lengths(report, folder)
    log.info("%s", text.partition("\nlook at:")[0])
    for warning in report["warnings"]:
        log.warning("data: %s", warning)
    return report
