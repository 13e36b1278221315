"""`sweep=<file>`: the trials of a wandb sweep file without a server, and what happens when it is stopped or fails."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from alignment import config, sweep
from alignment.errors import ConfigError, Interrupted, UserError

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = 'command: ["${env}", python, "${program}", "${args_no_hyphens}"]\n'


def write(folder: Path, parameters: str, method: str = "grid", more: str = "") -> str:
    text = f"program: run.py\n{COMMAND}method: {method}\n{more}parameters:\n{parameters}"
    (folder / "my.yaml").write_text(text, encoding="utf-8")
    return f"sweep={folder / 'my.yaml'}"


def spec(parameters: dict[str, Any], method: str = "random") -> dict[str, Any]:
    return {"method": method, "parameters": parameters}


def test_the_grid_of_a_file_is_the_product_of_its_values(tmp_path: Path) -> None:
    """wandb's own engine (its package sweeps 0.3.0) gives the same 36, looked at on 2026-12-01."""
    file = ROOT / "sweeps" / "grpo_beta_epsilon_group.yaml"
    typed = [f"sweep={file}", "task=sweep", f"output_dir={tmp_path / 'out'}", "model=tiny", "logger=csv"]
    trials = sweep._typed(typed).trials
    wanted = [
        f"algorithm=grpo algorithm.beta={beta} algorithm.clip_eps={eps} algorithm.group_size={size} "
        f"algorithm.num_iterations=2 seed={seed} model=tiny logger=csv"
        for beta, eps, size, seed in itertools.product([0, 0.04, 0.2], [0.1, 0.2], [4, 8], [1, 2, 3])
    ]
    assert [" ".join(trial.words) for trial in trials] == wanted
    assert [trial.folder for trial in trials] == [tmp_path / "out" / str(number) for number in range(36)]


def test_what_the_command_says_besides_is_kept(tmp_path: Path) -> None:
    file = ROOT / "sweeps" / "dpo_beta.yaml"
    first = sweep._typed([f"sweep={file}", f"output_dir={tmp_path / 'out'}"]).trials[0]
    wanted = "algorithm=dpo ref_strategy=precompute algorithm.beta=0.01 seed=1 logger=[csv,wandb]"
    assert " ".join(first.words) == wanted


@pytest.mark.parametrize(
    ("written", "word", "value"),
    [
        ("5e-7", "5e-07", 5e-7),
        ("1e3", "1000.0", 1000.0),
        ("'5e-7'", "'5e-7'", "5e-7"),
        ("true", "true", True),
        ("'true'", "'true'", "true"),
        ("'1'", "'1'", "1"),
        ("1", "1", 1),
        ("null", "null", None),
        ("dpo", "dpo", "dpo"),
        ("[csv, '2']", "[csv,'2']", ["csv", "2"]),
        ("{a: 1.5}", "{a:1.5}", {"a": 1.5}),
        ('"it\'s, so"', "'it\\'s, so'", "it's, so"),
    ],
)
def test_a_value_keeps_its_type(written: str, word: str, value: object) -> None:
    assert sweep.as_word(yaml.load(written, sweep.Loader)) == word
    with config.composer(config.parse([])) as session:
        ((override,), problems) = session.read([f"+x.y={word}"])
    read = override.value()
    read = [str(one) for one in read] if isinstance(read, list) else read
    assert problems == []
    assert (read, type(read)) == (value, type(value))


def test_nested_parameters_are_dotted() -> None:
    inner = {"parameters": {"beta": {"values": [1, 2]}, "deep": {"parameters": {"x": {"value": 3}}}}}
    found = sweep.points(spec({"algorithm": inner, "seed": {"min": 1, "max": 2}}, "grid"), None, 0)
    assert [tuple(point.values()) for point in found] == [(1, 3, 1), (1, 3, 2), (2, 3, 1), (2, 3, 2)]
    assert list(found[0]) == ["algorithm.beta", "algorithm.deep.x", "seed"]


def test_random_values_have_their_distributions() -> None:
    """4000 draws: a mean lies within 5 standard errors of the true one."""
    given = {
        "uniform": {"min": 0.0, "max": 2.0},  # mean 1, variance 4/12
        "whole": {"min": 1, "max": 3},  # mean 2, variance 2/3
        "log": {"distribution": "log_uniform_values", "min": 1e-6, "max": 1e-2},  # log10: mean -4, variance 16/12
        "old_log": {"distribution": "log_uniform", "min": -1, "max": 1},  # ln: mean 0, variance 4/12
        "normal": {"distribution": "normal", "mu": 3, "sigma": 2},
        "steps": {"distribution": "q_uniform", "min": 0, "max": 10, "q": 5},  # 0, 5, 10 at 1/4, 1/2, 1/4
        "choice": {"values": ["a", "b"], "probabilities": [0.25, 0.75]},
    }
    found = sweep.points(spec(given), 4000, 7)
    columns = {name: [point[name] for point in found] for name in given}
    columns["log"] = [math.log10(value) for value in columns["log"]]
    columns["old_log"] = [math.log(value) for value in columns["old_log"]]
    columns["choice"] = [float(value == "b") for value in columns["choice"]]
    true = {"uniform": (1, 1 / 3), "whole": (2, 2 / 3), "log": (-4, 4 / 3), "old_log": (0, 1 / 3), "normal": (3, 4)}
    true |= {"steps": (5, 12.5), "choice": (0.75, 0.1875)}
    for name, (mean, variance) in true.items():
        assert abs(sum(columns[name]) / 4000 - mean) < 5 * math.sqrt(variance / 4000), name
    assert {type(value) for value in columns["whole"]} == {int}
    assert set(columns["steps"]) == {0, 5, 10}
    assert min(columns["log"]) >= -6 and max(columns["log"]) <= -2


def test_more_random_trials_begin_with_the_same_ones() -> None:
    given = spec({"x": {"min": 0.0, "max": 1.0}})
    assert sweep.points(given, 5, 3)[:2] == sweep.points(given, 2, 3)
    assert sweep.points(given, 2, 3) != sweep.points(given, 2, 4)


@pytest.mark.parametrize(
    ("parameters", "method", "more", "words"),
    [
        ("  seed: {values: [1]}", "bayes", "", ["bayes chooses from earlier results", "method: random"]),
        ("  seed: {values: [1]}", "grid", "early_terminate: {type: hyperband}\n", ["early_terminate is not done here"]),
        ("  seed: {min: 0.0, max: 1.0}", "grid", "", ["seed: uniform has no end of values"]),
        ("  seed: {min: 3, max: 1}", "random", "", ["seed: min 3 is above max 1"]),
        ("  seed: {values: [1, 2], probabilities: [1, 1]}", "random", "", ["seed: probabilities are not 2 numbers"]),
        ("  seed: {distribution: beta}", "random", "", ["no distribution beta"]),
        ("  seed: {distribution: q_uniform, min: 1, max: 2}", "random", "", ["seed: q is missing"]),
        ("  seed: {distribution: normal, mu: a, sigma: 1}", "random", "", ["seed: mu is 'a', no number"]),
        ("  a: {value: 1, q: 2}\n  b: 3", "grid", "", ["a: q means nothing to constant", "b: 3 is no parameter"]),
    ],
)
def test_a_file_that_cannot_be_done_is_refused(
    tmp_path: Path, parameters: str, method: str, more: str, words: list[str]
) -> None:
    word = write(tmp_path, parameters, method, more)
    with pytest.raises(ConfigError) as caught:
        sweep._typed([word, "sweep.count=3"])
    for text in words:
        assert text in str(caught.value)


def test_a_random_search_has_an_end(tmp_path: Path) -> None:
    word = write(tmp_path, "  seed: {min: 1, max: 9}", "random")
    with pytest.raises(ConfigError, match=r"type sweep.count=20"):
        sweep._typed([word])
    capped = write(tmp_path, "  seed: {min: 1, max: 9}", "random", "run_cap: 4\n")
    assert len(sweep._typed([capped]).trials) == 4
    assert len(sweep._typed([capped, "sweep.count=2"]).trials) == 2


def test_all_trials_are_checked_before_the_first_starts(toy: list[str], tmp_path: Path, run_py: ModuleType) -> None:
    word = write(tmp_path, "  seed: {values: [1, x]}\n  algorithm.beta: {values: [0.1, -1]}")
    with pytest.raises(ConfigError) as caught:
        run_py.run([*toy, word, "output_dir=out"])
    assert "[trial 2, 3] seed: " in str(caught.value)
    assert "[trial 1, 3] algorithm.beta: " in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_finished_trials_stay_and_failed_ones_are_tried_again_when_asked(
    toy: list[str],
    tmp_path: Path,
    run_py: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metric = "metric: {name: score, goal: maximize}\n"
    argv = [*toy, write(tmp_path, "  seed: {values: [1, 2, 4]}", more=metric), "output_dir=out"]
    with pytest.raises(UserError, match=r"1 of 3 trials failed(.|\n)*  1: ValueError: seed two"):
        run_py.run(argv)
    assert "best score: 4, trial 2: seed=4" in capsys.readouterr().out
    times = {name: (tmp_path / "out" / name / "seen0.json").stat().st_mtime_ns for name in "012"}
    with pytest.raises(UserError, match="1 of 3 trials failed"):
        run_py.run(argv)
    monkeypatch.setattr(sys.modules["toy_task"], "run", lambda cfg, word: {"score": 9.0})
    assert {name: (tmp_path / "out" / name / "seen0.json").stat().st_mtime_ns for name in "012"} == times
    result = run_py.run(["resume=out", "sweep.retry=true"])
    assert (result["num_trials"], result["best"]) == (3, ["seed=2", "task=toy"])
    assert (tmp_path / "out" / "0" / "seen0.json").stat().st_mtime_ns == times["0"]
    assert not (tmp_path / "out" / "1" / "error.txt").exists()


def test_an_interrupted_sweep_goes_on(
    toy: list[str], tmp_path: Path, run_py: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [*toy, write(tmp_path, "  seed: {values: [1, 5, 4]}"), "output_dir=out"]
    with pytest.raises(Interrupted) as caught:
        run_py.run(argv)
    assert f"python run.py resume={tmp_path / 'out'}" in config.how_to_resume(caught.value)
    assert not (tmp_path / "out" / "2").exists()
    monkeypatch.setattr(sys.modules["toy_task"], "run", lambda cfg, word: {"score": float(cfg["seed"])})
    assert run_py.run(argv)["num_trials"] == 3
    scores = [json.loads((tmp_path / "out" / name / "objective.json").read_text())["score"] for name in "012"]
    assert scores == [1.0, 5.0, 4.0]


def test_other_trials_do_not_go_into_the_same_folder(toy: list[str], tmp_path: Path, run_py: ModuleType) -> None:
    run_py.run([*toy, write(tmp_path, "  seed: {values: [1, 4]}"), "output_dir=out"])
    with pytest.raises(ConfigError, match="holds a sweep with other trials"):
        run_py.run([*toy, write(tmp_path, "  seed: {values: [7, 4]}"), "output_dir=out"])
    assert run_py.run([*toy, write(tmp_path, "  seed: {values: [1, 4, 7]}"), "output_dir=out"])["num_trials"] == 3
    with pytest.raises(ConfigError, match=r"seed: is varied by the sweep: leave seed=3 out"):
        run_py.run([*toy, write(tmp_path, "  seed: {values: [1, 4]}"), "seed=3"])
    with pytest.raises(ConfigError, match="goes on as it was started"):
        run_py.run(["resume=out", "model=tiny"])
