"""Folders of runs as `task=fit` leaves them, without training anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment.experiment.record import MetricsFile, Samples

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make_run("0", {"algorithm.beta": 0.1, "seed": 1}, accuracy=0.5): a finished run in <tmp_path>/sweep/0."""

    def make(name: str, config: dict[str, Any], *, accuracy: float | None, kl: float = 1.0) -> Path:
        folder = tmp_path / "sweep" / name
        folder.mkdir(parents=True)
        nested: dict[str, Any] = {"task": {"_target_": "alignment.task.fit.run"}, "output_dir": str(folder)}
        for key, value in config.items():
            node = nested
            *above, last = key.split(".")
            for part in above:
                node = node.setdefault(part, {})
            node[last] = value
        (folder / "config.yaml").write_text(yaml.safe_dump(nested))
        if accuracy is None:
            return folder
        file = MetricsFile(folder)
        for step, share in ((0, 0.0), (5, 0.5), (10, 1.0)):
            file.append(step, "val", {"val/accuracy": accuracy * share, "val/kl": kl * share})
            rows = [
                {"step": step, "phase": "val", "prompt": "2 + 2?", "completion": f"<b>{n}</b>", "reward": float(n == 4)}
                for n in range(8)
            ]
            Samples(folder).append(rows)
        (folder / "summary.json").write_text(json.dumps({"val/accuracy": accuracy, "steps": 10, "output_dir": "x"}))
        return folder

    return make
