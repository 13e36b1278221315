"""Seconds of a report over many runs, broken ones among them.

    python benchmarks/report.py --runs 200

Writes folders as `task=fit` leaves them (40 evaluations, 400 logged steps, 2,560 completions each) and reports on them.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
METRICS = [f"train/{name}" for name in ("loss", "kl", "entropy", "grad_norm", "lr", "ratio", "tokens")]


def make_run(folder: Path, beta: float, group: int, seed: int) -> None:
    folder.mkdir(parents=True)
    draw = random.Random(f"{beta} {group} {seed}")
    config = {"task": {"_target_": "alignment.task.fit.run"}, "seed": seed}
    config["algorithm"] = {"_target_": "alignment.algorithm.grpo.GRPO", "beta": beta, "group_size": group}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with open(folder / "metrics.csv", "w") as file:
        file.write("step,phase," + ",".join([*METRICS, "val/accuracy", "val/kl"]) + "\n")
        for step in range(1, 401):
            values = ",".join(f"{draw.random():.6f}" for _ in METRICS)
            file.write(f"{step},train,{values},,\n")
            if step % 10 == 0:
                file.write(f"{step},val,{',' * len(METRICS)}{draw.random():.6f},{draw.random():.6f}\n")
    with open(folder / "samples.jsonl", "w") as file:
        for step in range(10, 401, 10):
            for _ in range(64):
                row = {"step": step, "phase": "val", "prompt": "What is 2 + 2?", "completion": "4 " * 30, "reward": 1.0}
                file.write(json.dumps(row | {"parts": {"accuracy": 1.0}}) + "\n")
    (folder / "summary.json").write_text(json.dumps({"val/accuracy": draw.random(), "seconds": 1.0}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for number in range(options.runs):
            beta, group, seed = (0.0, 0.02, 0.04, 0.1, 0.2)[number % 5], (4, 8)[number // 5 % 2], number // 10
            make_run(place / "runs" / str(number), beta, group, seed)
        (place / "runs" / "3" / "summary.json").unlink()
        (place / "runs" / "4" / "config.yaml").write_text("a: [")
        words = ["task=report", f"runs={place / 'runs'}", f"output_dir={place / 'report'}"]
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "run.py", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        found = json.loads((place / "report" / "report.json").read_text())
        size = (place / "report" / "report.html").stat().st_size / 2**20
    print(json.dumps(found | {"seconds": round(seconds, 1), "page_mib": round(size, 1)}, indent=2))


if __name__ == "__main__":
    main()
