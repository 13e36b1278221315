"""`task=compare`: in what two runs differ."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from alignment.errors import UserError
from alignment.experiment.difference import as_markdown, differences

log = logging.getLogger("alignment")


def run(cfg: dict[str, Any]) -> dict[str, Any]:
    """Print and keep (compare.md) how two runs differ in config, code, data, packages, machine and results."""
    places = [cfg["runs"]] if isinstance(cfg["runs"], str) else list(cfg["runs"])
    if len(places) != 2:
        raise UserError(f"runs: task=compare takes two runs, got {len(places)}: type runs=[<run folder>,<run folder>]")
    found = differences(places[0], places[1])
    text = as_markdown(found, (str(places[0]), str(places[1])))
    log.info("\n%s", text)
    path = Path(cfg["output_dir"]) / "compare.md"
    path.write_text(text, encoding="utf-8")
    return {"differences": {section: len(rows) for section, rows in found.items() if section != "results"}}
