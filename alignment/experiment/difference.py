"""How two runs differ: in what was asked for, in code, packages, machine and data, and in what came out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from alignment.errors import UserError
from alignment.experiment.runs import BROKEN, flat, read_run

# Where a run lies and when it ran: these differ always and mean nothing.
ALWAYS = ("output_dir", "resume", "started", "command", "working_directory", "resumed", "seconds", "git.branch")
# Sections of manifest.json, in the order of how much they usually explain.
SECTIONS = {
    "code": "git.",
    "data": "data.",
    "packages": "packages.",
    "machine": "machine.",
    "environment": "environment.",
}

Rows = list[tuple[str, Any, Any]]


def differences(one: str | Path, other: str | Path) -> dict[str, Rows]:
    """Section -> (key, value of the first run, value of the second), equal ones left out.

    Sections: config, code, data, packages, machine, environment, other, results. What only one run has is None for the
    other. Results are all numbers of both summaries, equal ones too. UserError for a folder that is no readable run.
    """
    runs = [_read(Path(place).expanduser()) for place in (one, other)]
    found = {"config": _differing(runs[0]["config"], runs[1]["config"])}
    rest = _differing(runs[0]["manifest"], runs[1]["manifest"])
    for section, prefix in SECTIONS.items():
        found[section] = [(key.removeprefix(prefix), a, b) for key, a, b in rest if key.startswith(prefix)]
    known = tuple(SECTIONS.values())
    found["other"] = [row for row in rest if not row[0].startswith(known) and row[0] != "seed"]
    found["results"] = _numbers(runs[0]["summary"], runs[1]["summary"])
    return found


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    run = read_run(folder) if (folder / "config.yaml").is_file() else None
    if run is None or run.status == BROKEN:
        why = run.reason if run else "it holds no config.yaml of a run"
        raise UserError(f"runs: {folder} cannot be compared, {why}: type runs=[<run folder>,<run folder>]")
    try:
        manifest = flat(json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        manifest = {}
    return {"config": run.config, "manifest": manifest, "summary": run.summary}


def _differing(one: dict[str, Any], other: dict[str, Any]) -> Rows:
    keys = [key for key in dict.fromkeys([*one, *other]) if not key.startswith(ALWAYS)]
    return [(key, one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)]


def _numbers(one: dict[str, Any], other: dict[str, Any]) -> Rows:
    def is_number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    keys = [key for key in dict.fromkeys([*one, *other]) if is_number(one.get(key)) or is_number(other.get(key))]
    return [(key, one.get(key), other.get(key)) for key in keys if not key.startswith("before/")]


def as_markdown(found: dict[str, Rows], names: tuple[str, str]) -> str:
    """One table per section that has something to say."""
    parts = []
    for section, rows in found.items():
        if not rows:
            continue
        header = ["key", *names] + (["difference"] if section == "results" else [])
        lines = [f"### {section}", "", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        for key, a, b in rows:
            cells = [key, _cell(a), _cell(b)] + ([_gap(a, b)] if section == "results" else [])
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    same = [section for section, rows in found.items() if not rows and section not in ("other", "results")]
    parts += [f"No difference in {', '.join(same)}."] if same else []
    return "\n\n".join(parts) + "\n"


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _gap(one: Any, other: Any) -> str:
    return "" if one is None or other is None else f"{other - one:+.4g}"
