"""What PPO's four models weigh on SmolLM2-135M: on one shared base, and as four; and that the numbers are the same.

    python benchmarks/ppo_memory.py --output benchmarks/ppo_memory.json

A reward model is trained for a few steps first. Then two runs of PPO from one seed, each in a process of its own,
float32, both training LoRA adapters:
shared: critic=adapter, ref_strategy=lora, and the reward model's adapter: four adapters' worth on one base.
four:   critic=model, ref_strategy=frozen, and the reward model merged into a base of its own.
Bytes are those of the different tensors that policy, critic, reference and reward model hold at the end of the run.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
STEADY = ["trainer.precision=32-true", "trainer.enable_progress_bar=false", "evaluation.num_prompts=0"]
PPO = ["algorithm=ppo", "algorithm.num_rollouts=2", "algorithm.num_prompts=4", "algorithm.group_size=4"]
PPO += ["algorithm.microbatch_size=16"]
WAYS = {
    "shared": ["algorithm.critic=adapter", "ref_strategy=lora"],
    "four": ["algorithm.critic=model", "ref_strategy=frozen"],
}


def run_and_measure(words: list[str]) -> None:
    """In a process of its own: one run, and what its models hold, as JSON on the last line."""
    import run
    from alignment.algorithm.ppo import PPO as Module
    from alignment.callbacks.rollout import RolloutCallback

    def at_the_end(module: Any) -> None:
        (rollout,) = (c for c in module.trainer.callbacks if isinstance(c, RolloutCallback))
        models = [module, rollout.rewards.rewards["model"].model, getattr(module.reference, "model", None)]
        tensors = [p for model in models if model is not None for p in model.parameters()]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        print(json.dumps({"weights_mib": sum(held.values()) / 2**20}), flush=True)

    Module.on_train_end = at_the_end
    run.run(words)


def child(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def measured(folder: Path, words: list[str]) -> dict[str, Any]:
    said = child(__file__, "--run", f"output_dir={folder}", *STEADY, *PPO, *words)
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    with open(folder / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["phase"] == "train"]
    found["losses"] = [float(row["train/loss"]) for row in rows]
    found["rewards"] = [float(row["rollout/reward"]) for row in rows if row["rollout/reward"]]
    return found | {"peak_rss_gib": json.loads((folder / "summary.json").read_text())["peak_rss_gib"]}


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        run_and_measure(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        scorer = ["algorithm=reward_model", "algorithm.max_steps=2", f"output_dir={root / 'rm'}"]
        child("run.py", *STEADY, *scorer)
        paths = {"shared": root / "rm" / "model" / "adapter", "four": root / "rm" / "model"}
        reward = {way: ["reward=model", f"reward.model.path={path}"] for way, path in paths.items()}
        result: dict[str, Any] = {way: measured(root / way, WAYS[way] + reward[way]) for way in WAYS}
    result["ratio"] = result["shared"]["weights_mib"] / result["four"]["weights_mib"]
    result["gap_of_first_loss"] = abs(result["shared"]["losses"][0] - result["four"]["losses"][0])
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
