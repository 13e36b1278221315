"""What each way to keep a reference costs, on SmolLM2-135M, and that none changes a number.

    python benchmarks/reference.py --steps 8 --output benchmarks/reference.json

Three parts, each made of whole runs of run.py in processes of their own, float32:
curves: DPO from one seed with `lora`, `frozen` and `precompute`: largest difference of the training loss, peak memory;
    and `sync` with alpha=1, every=1, whose reference is the policy before each step: largest distance from ln 2.
sweep: `-m algorithm=dpo,ipo algorithm.beta=0.05,0.1,0.5` with `precompute` and an empty cache, and with `frozen`:
    seconds each of the six jobs spends on reference log-probs before training, largest difference of the losses.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STEADY = ["trainer.precision=32-true", "trainer.enable_progress_bar=false", "evaluation.num_prompts=0"]
BATCH = ["algorithm.batch_size=8", "algorithm.microbatch_size=8"]
# A prompt of about 170 tokens, so that the reference has something to read.
PREFACE = "You are careful with numbers and never guess. Read the whole question before you answer it. " * 8
QUESTION = PREFACE + "What is {a} {op} {b}? Reply with the number only."


def run(folder: Path, *words: str) -> None:
    given = [*BATCH, f"data.question='{QUESTION}'"]
    command = [sys.executable, str(ROOT / "run.py"), f"output_dir={folder}", *STEADY, *given, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def losses(folder: Path) -> list[float]:
    with open(folder / "metrics.csv") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["phase"] == "train"]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def gap(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) > 0
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def curves(root: Path, steps: int) -> dict[str, Any]:
    ways = {
        "lora": ["ref_strategy=lora"],
        "frozen": ["ref_strategy=frozen"],
        "precompute": ["ref_strategy=precompute", f"ref_strategy.folder={root / 'cache'}"],
        "sync": ["ref_strategy=sync", "ref_strategy.alpha=1.0", "ref_strategy.every=1"],
    }
    for name, words in ways.items():
        run(root / name, "algorithm=dpo", f"algorithm.max_steps={steps}", *words)
    found = {name: losses(root / name) for name in ways}
    return {
        "losses": found,
        "peak_rss_gib": {name: summary(root / name)["peak_rss_gib"] for name in ways},
        "seconds": {name: summary(root / name)["seconds"] for name in ways},
        "largest_gap_to_lora": {name: gap(found[name], found["lora"]) for name in ("frozen", "precompute")},
        "largest_gap_of_sync_to_ln2": max(abs(value - math.log(2)) for value in found["sync"]),
    }


def sweep(root: Path, steps: int) -> dict[str, Any]:
    grid = ["-m", "algorithm=dpo,ipo", "algorithm.beta=0.05,0.1,0.5", f"algorithm.max_steps={steps}"]
    run(root / "stored", *grid, "ref_strategy=precompute", f"ref_strategy.folder={root / 'empty'}")
    run(root / "held", *grid, "ref_strategy=frozen")
    jobs = [str(number) for number in range(6)]
    stored = [summary(root / "stored" / job) for job in jobs]
    return {
        "reference_seconds": [job["reference/seconds"] for job in stored],
        "examples_reused": [job["reference/reused"] for job in stored],
        "examples_computed": [job["reference/computed"] for job in stored],
        "largest_gap_to_frozen": [gap(losses(root / "stored" / job), losses(root / "held" / job)) for job in jobs],
        "last_losses": [losses(root / "stored" / job)[-1] for job in jobs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of every run")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    result: dict[str, Any] = {"steps": options.steps, "machine": f"{platform.machine()}, {platform.python_version()}"}
    with tempfile.TemporaryDirectory() as name:
        for part in (curves, sweep):
            result[part.__name__] = part(Path(name) / part.__name__, options.steps)
            print(json.dumps({part.__name__: result[part.__name__]}, indent=2), flush=True)
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
