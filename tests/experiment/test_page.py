"""The page of a report: whole, safe, and of bounded size."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from alignment.experiment.page import write_page
from alignment.experiment.record import MetricsFile, Samples
from alignment.experiment.runs import find_runs
from alignment.experiment.settings import compare


def page(tmp_path: Path, num_samples: int = 4) -> tuple[str, dict[str, Any]]:
    runs = find_runs([tmp_path / "sweep"])
    text = write_page(compare(runs), runs, tmp_path / "report.html", title="t", num_samples=num_samples).read_text()
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return text, json.loads(found[1])


def test_it_holds_settings_curves_and_samples(make_run, tmp_path: Path) -> None:
    for seed in (1, 2):
        make_run(str(seed), {"algorithm.beta": 0.1 * seed, "seed": seed}, accuracy=0.5 * seed)
    text, data = page(tmp_path)
    assert [row[0] for row in data["rows"]] == ["0.2", "0.1"]
    assert data["runs"][0]["curves"]["val/accuracy"] == [[0, 0.0], [5, 0.25], [10, 0.5]]
    assert [s["completion"] for s in data["runs"][0]["samples"] if s["step"] == 10] == [
        f"<b>{n}</b>" for n in (0, 2, 4, 6)
    ]
    assert not re.search(r'(src|href)="?http', text)  # no network is needed


def test_no_completion_can_end_the_script(make_run, tmp_path: Path) -> None:
    folder = make_run("0", {"seed": 1}, accuracy=0.5)
    evil = "</script><script>alert(1)</script>"
    Samples(folder).append([{"step": 11, "phase": "val", "prompt": evil, "completion": evil, "reward": None}])
    text, data = page(tmp_path)
    assert evil not in text
    assert data["runs"][0]["samples"][-1]["completion"] == evil


def test_broken_runs_are_listed_and_long_ones_thinned(make_run, tmp_path: Path) -> None:
    folder = make_run("0", {"seed": 1}, accuracy=0.5)
    for step in range(11, 1000):
        MetricsFile(folder).append(step, "train", {"train/loss": 1.0}) if step % 3 == 0 else None
    (make_run("1", {"seed": 2}, accuracy=0.5) / "config.yaml").write_text("[")
    data = page(tmp_path)[1]
    assert [row[1] for row in data["run_rows"]] == ["done", "broken"]
    assert data["runs"][1]["curves"] is None
    loss = data["runs"][0]["curves"]["train/loss"]
    assert len(loss) == 200
    assert (loss[0][0], loss[-1][0]) == (12, 999)
