"""The command line: what is refused and how, and that a value means the same on every path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment import config
from alignment.errors import ConfigError


def problems(*argv: str) -> list[str]:
    try:
        config.preflight(config.parse(list(argv)))
    except ConfigError as error:
        return error.problems
    return []


def jobs(*argv: str) -> list[dict[str, Any]]:
    """The plain configs of a command's jobs."""
    command = config.parse(list(argv))
    found = []
    with config.composer(command) as session:
        lists, _, unreadable = session.sweep() if command.multirun else ([command.lines], Path(), [])
        assert unreadable == []
        for number, lines in enumerate(lists):
            cfg, whole, wrong, _ = session.settle(lines)
            assert cfg is not None, wrong
            assert whole is not None
            assert wrong == []
            config._place(whole, number if command.multirun else None)
            found.append(config.resolve(cfg)[0])
    return found


# ---- refusals ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "key", "hint"),
    [
        (["algorithm.betta=0.1"], "algorithm.betta", "algorithm.beta=0.1"),
        (["algoritm=dpo"], "algoritm", "algorithm=dpo"),
        (["algorithm=dpoo"], "algorithm", "algorithm=dpo"),
        (["algorithm=base/online"], "algorithm", "algorithm="),
        (["evaluation.num_sample=3"], "evaluation.num_sample", "evaluation.num_samples=3"),
        (["+evaluation.num_sample=3"], "evaluation.num_sample", "evaluation.num_samples=3"),
        (["+sed=1"], "sed", "seed=1"),
        (["+algorithm.lr=1e-3"], "algorithm.lr", "algorithm.lr=1e-3 (without +)"),
        (["algorithm.lr.x=3"], "algorithm.lr.x", "algorithm.lr=3"),
        (["trainer.profiler=simple"], "trainer.profiler", "+trainer.profiler=simple"),
        (["+trainer.profilr=simple"], "trainer.profilr", "trainer.profiler=simple"),
        (["+trainer.max_steps=5"], "trainer.max_steps", "algorithm.max_steps="),
        (["dpo"], "dpo", "algorithm=dpo"),
        (["--algorithm=dpo"], "--algorithm=dpo", "algorithm=dpo"),
        (["seed=1,2"], "seed", "-m seed=1,2 for that, 'seed=[1,2]' for a list or \"seed='1,2'\" for text"),
        (["algorithm=grpo", "algorithm=dpo", "ref_strategy=lora"], "algorithm", "algorithm=grpo or algorithm=dpo"),
        (["algorithm.lr={1"], "algorithm.lr", "\"algorithm.lr='{1'\", with both kinds of quotes"),
        (["~algorithm.betta"], "algorithm.betta", "algorithm.beta="),
        (["~algorithm.lr"], "algorithm.lr", "+algorithm.lr=<a number>"),
        (["~algorithm"], "algorithm", "algorithm=grpo"),
        (["evaluation.every=???"], "evaluation.every", "evaluation.every=<value>"),
        (["evaluation.every=${nowhere}"], "evaluation.every", "evaluation.every=<value>"),
        (["algorithm.lr='5e-7'"], "algorithm.lr", "algorithm.lr=5e-7"),
        (["algorithm.clip_eps_high=None"], "algorithm.clip_eps_high", "algorithm.clip_eps_high=null"),
        (["evaluation.every=2.0"], "evaluation.every", "evaluation.every=2"),
        (["debug=maybe"], "debug", "debug=false"),
        (["seed=true"], "seed", "seed=<a whole number>"),
        (["encoding.truncation=keep_ends"], "encoding.truncation", "encoding.truncation=keep_end"),
        (["optimizer.betas=0.9", "+optimizer.beta=1"], "optimizer.beta", "optimizer.betas=1"),
        (["output_dir="], "output_dir", "output_dir=outputs/<name>, or leave it out"),
        (["output_dir=/dev/null/run"], "output_dir", "output_dir=<a folder that you can write into>"),
        (["output_dir=${nope}"], "output_dir", "output_dir=<folder>"),
        (["optimizer.betas[0]=1"], "optimizer.betas[0]=1", "such as optimizer.betas.0=0.9"),
        (["algorithm@other=dpo"], "algorithm", "algorithm=dpo"),
        (["algorithm=[grpo,dpo]"], "algorithm", "algorithm=grpo, or -m algorithm=grpo,dpo for a job with each"),
        (["algorithm=null"], "algorithm", "algorithm=<option>"),
        (["~reward"], "reward", "reward=[]"),
        (["reward.accuracy=null"], "reward.accuracy", "~reward.accuracy to leave it out"),
        (["algorithm._target_=null"], "algorithm._target_", "algorithm=<option>"),
        (["evaluation=3"], "evaluation", "evaluation.num_prompts=<value>"),
        (["model.lora.r='16'"], "model.lora.r", "model.lora.r=16"),
        (["+model.lora.alpha=3"], "model.lora.alpha", "model.lora.lora_alpha=3"),
        (["-m", "seed=interval(0,1)"], "seed", "seed=range(<start>,<stop>,<step>) or seed=<value>,<value>"),
        (["-m", "output_dir=a,b"], "hydra.sweep.dir", "hydra.sweep.dir=<one value>"),
        (["hydra.job.chdir=maybe"], "hydra.job.chdir", "--help to see what can be chosen"),
        (["hydra/launcher=nosuch"], "hydra/launcher", "--help to see what can be chosen"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_bad_command_line_is_refused_with_what_to_type(argv: list[str], key: str, hint: str) -> None:
    (message,) = problems(*argv)
    assert message.startswith(f"{key}: ")
    assert hint in re.split(r"[:?] type ", message)[-1]


def test_a_choice_that_is_not_there_hides_no_other_problem_and_makes_none() -> None:
    """What belongs to it, or follows from another option in its place, cannot be judged."""
    words = ["algorithm=dpoo", "algorithm.label_smoothing=0.1", "ref_strategy=precompute", "seed=-1", "model.adaptr=x"]
    found = problems(*words)
    assert [problem.split(":")[0] for problem in found] == ["algorithm", "model.adaptr", "seed"]
    assert found[0].endswith("type algorithm=dpo")


@pytest.mark.parametrize(
    "argv",
    [
        ["optimizer.betas.0=0.8"],
        ["algorithm=[grpo]"],
        ["reward=accuracy"],
        ["reward=[accuracy,format]", "logger=[]"],
        ["++algorithm.lr=3e-4"],
        ["+trainer.profiler=simple"],
        ["algorithm.lr=${evaluation.temperature}"],
        ["resume=null"],
        ["-m", "algorithm=glob(*,exclude=[gkd])", "ref_strategy=frozen"],  # gkd has no teacher by default
        ["hydra.mode=MULTIRUN", "seed=1,2"],
    ],
    ids=lambda argv: argv[0] if argv[0] != "-m" else argv[1],
)
def test_a_good_command_line_is_accepted(argv: list[str]) -> None:
    assert problems(*argv) == []


def test_a_file_that_cannot_be_used_is_refused_with_line_and_field(tmp_path: Path) -> None:
    """Before anything heavy loads, and beside the other problems."""
    rows = [f'{{"prompt": "What is {number} + 1?", "answer": "{number + 1}"}}' for number in range(30)]
    rows[11] = '{"answer": "3"}'
    rows[16] = '{"prompt": "What is'
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    found = problems("data=jsonl", f"data.path={tmp_path / 'rows.jsonl'}", "algorithm.lr=0")
    assert len(found) == 3
    assert found[0].startswith("algorithm.lr: ")
    assert f"{tmp_path / 'rows.jsonl'}:12: prompt: " in found[1]
    assert f"{tmp_path / 'rows.jsonl'}:17: " in found[2]
    (missing,) = problems("data=jsonl", "data.path=nowhere.jsonl")
    assert missing.startswith("data.path: ")
    assert "type data.path=" in missing


def test_problems_do_not_hide_each_other() -> None:
    found = problems(
        "algorithm.betta=0.1", "algorithm=grpo", "algorithm.group_size=1", "model=nosuch", "reward=[nope]", "x"
    )
    keys = [message.split(":")[0] for message in found]
    assert keys == ["x", "model", "reward", "algorithm.betta", "algorithm.group_size"]


def test_every_message_ends_with_what_to_type() -> None:
    found = problems("--foo", "a.b=1", "algorithm.lr=x", "seed=a:b:{", "~nothing", "task=fti", "trainer.devices=two")
    assert len(found) == 7
    assert [message for message in found if not re.match(r"\S+: .+ type \S+", message)] == []


def test_the_default_command_is_accepted() -> None:
    assert problems() == []


# ---- values mean the same on every path ----------------------------------------------------------------------------
def test_a_small_number_is_a_number_on_every_path(tmp_path: Path) -> None:
    """yaml alone reads 5e-7 as text: YAML 1.1 wants a dot and a sign."""
    assert yaml.safe_load("5e-7") == "5e-7"
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "small.yaml").write_text("# @package _global_\n# Small\nalgorithm:\n  lr: 5e-7\n")
    configs = [
        *jobs("algorithm.lr=5e-7"),
        *jobs("-m", "algorithm.lr=5e-7,5e-7"),
        *jobs("--config-dir", str(tmp_path), "experiment=small"),
    ]
    values = [cfg["algorithm"]["lr"] for cfg in configs]
    assert values == [5e-7] * 4
    assert {type(value) for value in values} == {float}


def test_null_is_none_on_every_path() -> None:
    configs = jobs("algorithm.clip_eps_high=null") + jobs("-m", "algorithm.clip_eps_high=null,0.3")
    assert [cfg["algorithm"]["clip_eps_high"] for cfg in configs] == [None, None, 0.3]


def test_none_as_a_word_is_refused_on_every_path() -> None:
    for argv in (["algorithm.clip_eps_high=None"], ["-m", "algorithm.clip_eps_high=None"], ["resume=None"]):
        assert "None" in problems(*argv)[0]


def test_what_a_run_saves_reads_back_as_it_was(tmp_path: Path) -> None:
    (cfg,) = jobs("algorithm.lr=5e-7", "algorithm.clip_eps_high=null", f"output_dir={tmp_path}")
    cfg["model"]["name"] = "1e-3"  # text that looks like a number stays text
    config.write_config(cfg)
    again = config.OmegaConf.to_container(config.OmegaConf.load(tmp_path / "config.yaml"))
    assert again == cfg


# ---- sweeps --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("model.name=a,b", ["a", "b"]),
        ("model.name='a,b'", ["a,b"]),
        ("model.name=[q_proj,v_proj],[q_proj]", [["q_proj", "v_proj"], ["q_proj"]]),
        ("model.name=range(1,4)", [1, 2, 3]),
        ("model.name=5e-7,null", [5e-7, None]),
    ],
)
def test_commas_are_jobs_unless_quoted(line: str, values: list[Any]) -> None:
    assert [cfg["model"]["name"] for cfg in jobs("-m", f"+{line}")] == values


def test_a_sweep_over_choices_and_keys_is_the_product() -> None:
    configs = jobs("-m", "algorithm=grpo,dpo", "seed=1,2")
    pairs = [(cfg["algorithm"]["_target_"].rpartition(".")[2], cfg["seed"]) for cfg in configs]
    assert pairs == [("GRPO", 1), ("GRPO", 2), ("DPO", 1), ("DPO", 2)]


def test_problems_of_all_jobs_are_told_once_each() -> None:
    found = problems(
        "-m", "algorithm=grpo,dpo", "seed=1,2", "algorithm.lr=0", "algorithm.group_size=1", "ref_strategy=frozen"
    )
    assert [message for message in found if message.startswith("algorithm.lr: ")]
    (of_some,) = [message for message in found if "too few" in message]
    assert of_some.startswith("[job 0 (algorithm=grpo seed=1")
    assert "seed=2" in of_some
    (unknown,) = [message for message in found if "no such key" in message]
    assert unknown.startswith("[job 2 (algorithm=dpo seed=1")
    assert len(found) == 3


def test_a_key_of_one_algorithm_only_is_refused_for_the_other() -> None:
    assert problems("-m", "algorithm=grpo,dpo", "algorithm.clip_eps=0.1", "ref_strategy=frozen")


def test_a_long_sweep_is_checked_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(config, "SWEEP_BUDGET", 0.0)
    plan = config.preflight(config.parse(["-m", "seed=range(0,500)"]))
    assert plan.num_jobs == 500
    assert "checked 1 of 500 jobs" in capsys.readouterr().err


def test_other_sweepers_are_checked_at_one_point() -> None:
    """A range of a sweeper that chooses as it goes: its first value stands for it."""
    parse = config.OverridesParser.create().parse_override
    lines = ["algorithm.lr=interval(0.1,0.2)", "seed=choice(3,4)", "algorithm=dpo", "+a=range(5,7)"]
    firsts = [config._first_value(parse(line)) for line in lines]
    assert firsts == ["algorithm.lr=0.1", "seed=3", "algorithm=dpo", "+a=5"]


# ---- folders -------------------------------------------------------------------------------------------------------
def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (message,) = problems(f"output_dir={tmp_path}")
    assert message.startswith("output_dir: ")
    assert "type output_dir=<another folder>" in message
    assert "resume=" not in message  # there is no checkpoint to go on from
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "00000005.ckpt").touch()
    (message,) = problems(f"output_dir={tmp_path}")
    assert f"type resume={tmp_path}" in message


def test_a_folder_that_holds_a_sweep_is_refused_once(tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.yaml").touch()
    (message,) = problems("-m", "seed=1,2", f"output_dir={tmp_path}")
    assert message.startswith("output_dir: ")
    assert "type output_dir=<another folder>" in message


def test_folders_of_jobs_started_together_differ() -> None:
    first, second = (config.preflight(config.parse([])).folder for _ in range(2))
    assert first != second


def test_processes_of_one_launch_need_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert [message.split(":")[0] for message in problems()] == ["output_dir"]
    assert problems("output_dir=outputs/together") == []
    assert problems("-m", "seed=1,2")[0].startswith("-m: ")


# ---- resume --------------------------------------------------------------------------------------------------------
@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    (cfg,) = jobs("algorithm=grpo", f"output_dir={tmp_path / 'elsewhere'}", "seed=3")
    folder = tmp_path / "run"
    config.write_config(cfg | {"output_dir": str(folder)})
    for name in ("checkpoints", "model"):  # model/ is a folder of the run here, not a group
        (folder / name).mkdir()
    (folder / "checkpoints" / "00000005.ckpt").touch()
    return folder


def test_a_run_goes_on_from_its_own_config(old_run: Path) -> None:
    """Moved folders too: output_dir is where the run is, not where it was."""
    moved = old_run.rename(old_run.with_name("moved"))
    argv = [f"resume={moved}", "algorithm.num_rollouts=40"]
    assert problems(*argv) == []
    (cfg,) = jobs(*argv)
    assert (cfg["seed"], cfg["algorithm"]["num_rollouts"]) == (3, 40)
    assert cfg["output_dir"] == str(moved)
    assert cfg["resume"] == str(moved)


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["algorithm=dpo"], "algorithm"),
        (["model=tiny"], "model"),
        (["algorithm.betta=1"], "algorithm.betta"),
        (["algorithm.group_size=1"], "algorithm.group_size"),
        (["output_dir=other"], "output_dir"),
        (["-m", "seed=1,2"], "resume"),
    ],
)
def test_what_cannot_change_on_resume_is_refused(old_run: Path, argv: list[str], key: str) -> None:
    (message,) = problems(f"resume={old_run}", *argv)
    assert message.startswith(f"{key}: ")
    assert " type " in message


def test_what_is_no_run_cannot_be_resumed(old_run: Path) -> None:
    assert "there is no folder" in problems("resume=nowhere")[0]
    assert "no config.yaml" in problems(f"resume={old_run.parent}")[0]
    (old_run / "checkpoints" / "00000005.ckpt").unlink()
    assert "no checkpoint" in problems(f"resume={old_run}")[0]
