"""Every algorithm with every reference strategy that the two classes say is possible; the rest is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import run
from alignment.errors import ConfigError
from alignment.signatures import declared

CONF = Path(run.__file__).parent / "conf"
ALGORITHMS = sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml"))
STRATEGIES = sorted(path.stem for path in (CONF / "ref_strategy").glob("*.yaml"))
# Two steps or rollouts of the smallest batches that every algorithm takes.
SMALL = [
    "model=tiny",
    "trainer.precision=32-true",
    "trainer.enable_progress_bar=false",
    "evaluation.num_prompts=4",
    "evaluation.every=1",
    "checkpoint.every=1",
]
ONLINE = [
    "algorithm.num_rollouts=2",
    "algorithm.num_iterations=1",
    "algorithm.num_prompts=2",
    "algorithm.microbatch_size=8",
    "rollout.max_new_tokens=4",
]
OFFLINE = ["algorithm.max_steps=2", "algorithm.batch_size=4", "algorithm.microbatch_size=2", "rollout.max_new_tokens=4"]

# What an option cannot run without: a teacher of the same tokens, with other weights than the student.
REQUIRED = {
    "gkd": [
        "algorithm.teacher._target_=alignment.model.tiny.Tiny",
        "algorithm.teacher.path=null",
        "+algorithm.teacher.seed=1",
    ],
}


def target(group: str, name: str) -> str:
    """The class of an option, through the options it extends."""
    node = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    if "_target_" in node:
        return node["_target_"]
    return target(group, next(base for base in node["defaults"] if base != "_self_"))


def says(group: str, name: str, what: str, default):
    return declared(target(group, name), what, default)


def possible(algorithm: str, strategy: str) -> bool:
    need = says("algorithm", algorithm, "reference_need", "optional")
    if not says("ref_strategy", strategy, "provides_reference", True):
        return need == "optional"
    if says("ref_strategy", strategy, "moves", False) and need == "optional":
        return False  # a reference that only measures the KL must stand still
    return not (says("ref_strategy", strategy, "offline_only", False) and says("algorithm", algorithm, "online", False))


def arguments(algorithm: str, strategy: str, folder: Path) -> list[str]:
    online = says("algorithm", algorithm, "online", False)
    where = [f"output_dir={folder}", f"algorithm={algorithm}", f"ref_strategy={strategy}"]
    words = [*where, *SMALL, *(ONLINE if online else OFFLINE), *REQUIRED.get(algorithm, [])]
    if says("algorithm", algorithm, "rows_per_prompt", "group_size") != "group_size":
        # Fewer rows are learned from than are sampled.
        words = [word.replace("microbatch_size=8", "microbatch_size=2") for word in words]
    read = says("ref_strategy", strategy, "moves", False) or not says(
        "ref_strategy", strategy, "provides_reference", True
    )
    if read and says("algorithm", algorithm, "reference_need", "") == "beta":
        words.append("algorithm.beta=0.1")  # many of these options have beta=0, which reads no reference
    own = whole_steps(algorithm)
    return [word for word in words if not (own and word.startswith("algorithm.microbatch_size="))]


def whole_steps(algorithm: str) -> bool:
    """Whether an option, or one that it extends, makes a step one microbatch by itself."""
    node = yaml.safe_load((CONF / "algorithm" / f"{algorithm}.yaml").read_text())
    names = [name for name in node.get("defaults", []) if name != "_self_" and not name.startswith("base/")]
    return node.get("microbatch_size") == "${algorithm.batch_size}" or any(map(whole_steps, names))


def extends_another(algorithm: str) -> bool:
    return "_target_" not in yaml.safe_load((CONF / "algorithm" / f"{algorithm}.yaml").read_text())


def cell(algorithm: str, strategy: str):
    """The usual run tries an option that only sets keys of another with one strategy, the slow one with all."""
    slow = extends_another(algorithm) and strategy != "lora"
    return pytest.param(algorithm, strategy, marks=[pytest.mark.slow] if slow else [])


GRID = [(algorithm, strategy) for algorithm in ALGORITHMS for strategy in STRATEGIES]


@pytest.mark.parametrize(("algorithm", "strategy"), [cell(*pair) for pair in GRID if possible(*pair)])
def test_it_runs_and_leaves_a_whole_folder(algorithm: str, strategy: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    summary = run.run(arguments(algorithm, strategy, tmp_path / "run"))
    assert summary["steps"] == 2
    assert summary["train/loss"] == summary["train/loss"]  # a number, not NaN
    names = {"config.yaml", "manifest.json", "metrics.csv", "samples.jsonl", "summary.json", "curves.png", "model"}
    assert names <= {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize(("algorithm", "strategy"), [pair for pair in GRID if not possible(*pair)])
def test_the_impossible_is_refused_by_name(algorithm: str, strategy: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ref_strategy: .*type "):
        run.run(arguments(algorithm, strategy, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
