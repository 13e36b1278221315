"""Memory does not grow over a run (B75): what is kept of a step are numbers."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import run

ROOT = Path(run.__file__).parent
BASE = ["model=tiny", "trainer.precision=32-true", "trainer.enable_progress_bar=false", "checkpoint.every=1000"]
BASE += ["evaluation.num_prompts=8", "evaluation.every=25", "evaluation.num_samples=2"]
DPO = ["algorithm=dpo", "algorithm.batch_size=4", "algorithm.microbatch_size=4", "algorithm.max_steps=200"]
GRPO = ["algorithm=grpo", "algorithm.num_prompts=2", "algorithm.microbatch_size=16", "algorithm.num_rollouts=200"]
MIB = 2**20


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [DPO, GRPO], ids=["dpo", "grpo"])
def test_resident_memory_is_flat_between_steps_50_and_200(tmp_path: Path, algorithm: list[str]) -> None:
    words = [sys.executable, "run.py", f"output_dir={tmp_path / 'run'}", *BASE, *algorithm]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        seen: dict[int, int] = {}
        while process.poll() is None:
            step = _last_step(tmp_path / "run" / "metrics.csv")
            if step is not None:
                seen[step] = _resident(process.pid) or seen.get(step, 0)
            time.sleep(0.02)
    assert process.returncode == 0
    early = max(size for step, size in seen.items() if 40 <= step <= 60)
    late = max(size for step, size in seen.items() if 180 <= step <= 199)
    print(f"{early / MIB:.1f} MiB around step 50, {late / MIB:.1f} MiB before step 200")
    assert late - early < 20 * MIB


def _last_step(file: Path) -> int | None:
    try:
        steps = [line.partition(",")[0] for line in file.read_text().splitlines()[1:]]
    except FileNotFoundError:
        return None
    return max((int(step) for step in steps if step.isdigit()), default=None)


def _resident(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (FileNotFoundError, ProcessLookupError):
        return None
