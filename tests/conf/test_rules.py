"""Every rule refuses what it should with a message that names the key and says what to type, and nothing else."""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment import rules, signatures

CLASSES = """
class Online:
    online = True
    data_form = "prompts"
    reference_need = "beta"
    min_group = 2

class Pairs:
    online = True
    rows_per_prompt = 2

class Best:
    online = True
    rows_per_prompt = "num_kept"

class Offline:
    reference_need = "required"
    data_form = "pairs"

class Sorting:
    data_form = "pairs"
    sorted_losses = ("aot", "aot_unpaired")

class Free:
    reference_need = "optional"

class Frozen: ...

class Adapter:
    needs_adapter = True

class Scores:
    reference_need = "required"
    data_form = "pairs"
    samples = False

class Nothing:
    provides_reference = False

class Stored:
    offline_only = True

class Moving:
    moves = True

class Serving:
    other_process = True

class Sampling:
    online = True
    samples_in_process = True

class Prompts:
    forms = ("prompts", "demonstrations")

class File:
    checks_itself = True

    @staticmethod
    def problems(form, *, path):
        yield f"data.path: {path} has no {form}: type data.path=<a file>"
"""

ONLINE: dict[str, Any] = {
    "_target_": "toyrules.Online",
    "beta": 0.04,
    "clip_eps": 0.2,
    "lr": 1e-4,
    "num_prompts": 8,
    "group_size": 8,
    "microbatch_size": 32,
    "num_minibatches": 1,
    "num_rollouts": 3,
}
OFFLINE: dict[str, Any] = {"_target_": "toyrules.Offline", "beta": 0.1, "batch_size": 32, "microbatch_size": 8}
SORTING = OFFLINE | {"_target_": "toyrules.Sorting"}
GOOD: dict[str, Any] = {
    "seed": 0,
    "algorithm": ONLINE,
    "ref_strategy": {"_target_": "toyrules.Frozen"},
    "model": {"adapter": "lora", "adapter_path": None, "lora": {"init_lora_weights": True, "bias": "none"}},
    "reward": {"accuracy": {"weight": 1.0}},
    "rollout": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 12},
    "trainer": {"devices": 1, "num_nodes": 1, "gradient_clip_val": None},
    "evaluation": {"num_prompts": 0, "num_samples": 1, "every": 5, "temperature": 0},
    "checkpoint": {"every": 5, "keep": -1},
    "data": {"_target_": "toyrules.Frozen"},
}


@pytest.fixture(autouse=True)
def classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toyrules.py").write_text(CLASSES)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "00000007.ckpt").touch()
    monkeypatch.setenv("TOY_RUN", str(tmp_path / "run"))
    monkeypatch.syspath_prepend(str(tmp_path))
    signatures.load.cache_clear()


def config(**changes: Any) -> dict[str, Any]:
    """GOOD with dotted keys changed."""
    cfg = copy.deepcopy(GOOD)
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = cfg
        for name in parents:
            node = node[name]
        node[last] = value
    return cfg


def reference(name: str, **changes: Any) -> dict[str, Any]:
    return config(ref_strategy={"_target_": f"toyrules.{name}"}, **changes)


def resumed(**changes: Any) -> dict[str, Any]:
    """A run that has made 7 steps and goes on."""
    return config(resume=os.environ["TOY_RUN"], **changes)


def served(**changes: Any) -> dict[str, Any]:
    return config(rollout=GOOD["rollout"] | {"_target_": "toyrules.Serving"}, **changes)


SAMPLING = ONLINE | {"_target_": "toyrules.Sampling"}

# rule: (changed config, key of the message, what it tells to type)
CASES: dict[str, list[tuple[Callable[[], dict[str, Any]], str, str]]] = {
    "text_none": [(lambda: config(rollout__stop="None"), "rollout.stop", "rollout.stop=null")],
    "numbers_in_range": [
        (lambda: config(algorithm__lr=0), "algorithm.lr", "algorithm.lr=<a number, more than 0>"),
        (lambda: config(algorithm__lr=float("nan")), "algorithm.lr", "algorithm.lr="),
        (lambda: config(algorithm__beta=-0.1), "algorithm.beta", "algorithm.beta=<a number, at least 0>"),
        (
            lambda: config(algorithm__desirable_weight=-1),
            "algorithm.desirable_weight",
            "algorithm.desirable_weight=<a number, at least 0>",
        ),
        (
            lambda: config(algorithm__undesirable_weight=float("inf")),
            "algorithm.undesirable_weight",
            "algorithm.undesirable_weight=",
        ),
        (lambda: config(algorithm__clip_eps=1.0), "algorithm.clip_eps", "algorithm.clip_eps="),
        (lambda: config(algorithm__gae_lambda=1.1), "algorithm.gae_lambda", "algorithm.gae_lambda="),
        (
            lambda: config(algorithm__dual_clip=1.0),
            "algorithm.dual_clip",
            "algorithm.dual_clip=<a number, more than 1>",
        ),
        (lambda: config(algorithm__value_clip_eps=0), "algorithm.value_clip_eps", "algorithm.value_clip_eps="),
        (lambda: config(algorithm__reward_clip=0.0), "algorithm.reward_clip", "algorithm.reward_clip="),
        (lambda: config(algorithm__vf_coef=-1), "algorithm.vf_coef", "algorithm.vf_coef="),
        (lambda: config(algorithm__entropy_coef=-0.1), "algorithm.entropy_coef", "algorithm.entropy_coef="),
        (
            lambda: config(algorithm__target_kl_per_sequence=0),
            "algorithm.target_kl_per_sequence",
            "algorithm.target_kl_per_sequence=",
        ),
        (lambda: config(algorithm__critic_lr=0), "algorithm.critic_lr", "algorithm.critic_lr="),
        (lambda: config(rollout__temperature=0), "rollout.temperature", "rollout.temperature="),
        (lambda: config(rollout__top_p=0.0), "rollout.top_p", "rollout.top_p="),
        (lambda: config(rollout__top_p=1.1), "rollout.top_p", "rollout.top_p="),
        (lambda: config(rollout__top_k=-1), "rollout.top_k", "rollout.top_k="),
        (lambda: config(evaluation__temperature=-0.1), "evaluation.temperature", "evaluation.temperature="),
        (lambda: config(seed=-1), "seed", "seed="),
        (lambda: config(trainer__gradient_clip_val=0), "trainer.gradient_clip_val", "trainer.gradient_clip_val="),
    ],
    "counts_positive": [
        (lambda: config(algorithm__num_rollouts=0), "algorithm.num_rollouts", "algorithm.num_rollouts="),
        (lambda: config(algorithm__num_prompts=0), "algorithm.num_prompts", "algorithm.num_prompts="),
        (lambda: config(algorithm__length_window=0), "algorithm.length_window", "algorithm.length_window="),
        (lambda: config(rollout__max_new_tokens=0), "rollout.max_new_tokens", "rollout.max_new_tokens="),
        (lambda: config(evaluation__num_prompts=-1), "evaluation.num_prompts", "at least 0>"),
        (lambda: config(evaluation__every=0), "evaluation.every", "evaluation.every="),
        (lambda: config(checkpoint__every=0), "checkpoint.every", "checkpoint.every="),
        (lambda: config(trainer__devices=0), "trainer.devices", "trainer.devices="),
    ],
    "devices_counted": [(lambda: config(trainer__devices="auto"), "trainer.devices", "trainer.devices=1")],
    "checkpoints_kept": [(lambda: config(checkpoint__keep=0), "checkpoint.keep", "checkpoint.keep=-1")],
    "reference_provided": [
        (lambda: reference("Nothing"), "ref_strategy", "ref_strategy=lora or ref_strategy=frozen, or algorithm.beta=0"),
        (lambda: reference("Nothing", algorithm=OFFLINE), "ref_strategy", "ref_strategy=lora or ref_strategy=frozen"),
    ],
    "reference_known_in_advance": [(lambda: reference("Stored"), "ref_strategy", "ref_strategy=lora")],
    "moving_reference_used": [
        (lambda: reference("Moving", algorithm__beta=0), "ref_strategy", "ref_strategy=none, or algorithm.beta="),
        (lambda: reference("Moving", algorithm={"_target_": "toyrules.Free"}), "ref_strategy", "ref_strategy=none"),
    ],
    "adapter_for_reference": [
        (
            lambda: reference("Adapter", model__adapter="none"),
            "ref_strategy",
            "model.adapter=lora or ref_strategy=frozen",
        ),
        (
            lambda: reference("Adapter", model__adapter="none", algorithm={"_target_": "toyrules.Free"}),
            "ref_strategy",
            "model.adapter=lora or ref_strategy=none",
        ),
    ],
    "adapter_for_strategy": [
        (
            lambda: config(strategy={"_target_": "toyrules.Adapter"}, model__adapter="none"),
            "strategy",
            "model.adapter=lora",
        ),
        (
            lambda: config(
                strategy={"_target_": "toyrules.Adapter"}, algorithm=OFFLINE | {"_target_": "toyrules.Scores"}
            ),
            "strategy",
            "strategy=auto",
        ),
    ],
    "adapter_for_critic": [
        (
            lambda: config(algorithm__critic="adapter", model__adapter="none"),
            "algorithm.critic",
            "algorithm.critic=model",
        ),
    ],
    "adapter_leaves_base_alone": [
        (
            lambda: reference("Adapter", model__lora__init_lora_weights="pissa_niter_4"),
            "model.lora.init_lora_weights",
            "ref_strategy=frozen",
        ),
        (
            lambda: reference("Stored", algorithm=OFFLINE, model__lora__init_lora_weights="olora"),
            "model.lora.init_lora_weights",
            "ref_strategy=frozen",
        ),
        (lambda: reference("Adapter", model__lora__bias="all"), "model.lora.bias", "ref_strategy=frozen"),
    ],
    "policy_can_be_served": [
        (lambda: served(model__lora__use_dora=True), "model.lora.use_dora", "model.lora.use_dora=false"),
        (lambda: served(model__lora__modules_to_save=["x"]), "model.lora.modules_to_save", "modules_to_save=null"),
        (lambda: served(model__lora__bias="all"), "model.lora.bias", "model.lora.bias=none"),
        (lambda: served(model__lora__init_lora_weights="olora"), "model.lora.init_lora_weights", "rollout=hf"),
        (lambda: served(algorithm=SAMPLING), "rollout", "rollout=hf"),
    ],
    "group_large_enough": [
        (lambda: config(algorithm__group_size=1), "algorithm.group_size", "algorithm.group_size=2"),
    ],
    "rollout_divides": [
        # 64 rows: 48 divides neither 64 nor is it a multiple of 8 that does
        (lambda: config(algorithm__microbatch_size=48), "algorithm.microbatch_size", "algorithm.microbatch_size=32"),
        # 64 rows in 4 minibatches: 16 rows each
        (lambda: config(algorithm__num_minibatches=4), "algorithm.microbatch_size", "algorithm.microbatch_size=16"),
        # 6 is neither a multiple nor a divisor of a group of 8
        (lambda: config(algorithm__microbatch_size=6), "algorithm.microbatch_size", "algorithm.microbatch_size=4"),
        # 8 prompts on 3 devices
        (lambda: config(trainer__devices=3), "algorithm.num_prompts", "algorithm.num_prompts=6"),
        # 8 prompts leave 8 pairs, 16 rows, whatever the group; 8 prompts of which 3 samples each are kept leave 24
        (
            lambda: config(algorithm=ONLINE | {"_target_": "toyrules.Pairs"}),
            "algorithm.microbatch_size",
            "algorithm.microbatch_size=16",
        ),
        (
            lambda: config(algorithm=ONLINE | {"_target_": "toyrules.Best", "num_kept": 3}),
            "algorithm.microbatch_size",
            "algorithm.microbatch_size=24",
        ),
        # 64 rows cannot be cut in 3; 2 is the nearest number that works
        (lambda: config(algorithm__num_minibatches=3), "algorithm.num_minibatches", "algorithm.num_minibatches=2"),
    ],
    "overlong_fits": [
        # 12 tokens at most; the paper's share is a fifth
        (lambda: config(algorithm__overlong_tokens=13), "algorithm.overlong_tokens", "algorithm.overlong_tokens=2"),
        (lambda: config(algorithm__overlong_tokens=0), "algorithm.overlong_tokens", "algorithm.overlong_tokens=2"),
    ],
    "resumed_run_goes_on": [
        (lambda: resumed(algorithm__num_rollouts=6), "algorithm.num_rollouts", "algorithm.num_rollouts=<at least 7>"),
        # 7 steps of 2 each are 4 rollouts, the last one unfinished
        (
            lambda: resumed(algorithm=ONLINE | {"num_rollouts": 3, "num_iterations": 2}),
            "algorithm.num_rollouts",
            "algorithm.num_rollouts=<at least 4>",
        ),
        (
            lambda: resumed(algorithm=OFFLINE | {"max_steps": 6}),
            "algorithm.max_steps",
            "algorithm.max_steps=<at least 7>",
        ),
    ],
    "batch_divides": [
        (
            lambda: config(algorithm=OFFLINE | {"microbatch_size": 12}),
            "algorithm.batch_size",
            "algorithm.microbatch_size=8 or algorithm.batch_size=24",
        ),
        (lambda: config(algorithm=OFFLINE, trainer__devices=3), "algorithm.batch_size", "algorithm.batch_size=24"),
        (lambda: config(algorithm=OFFLINE | {"batch_size": 4}), "algorithm.batch_size", "algorithm.microbatch_size=4"),
    ],
    "divergence_in_range": [
        (lambda: config(algorithm=OFFLINE | {"lmbda": 0.5, "beta": 1.5}), "algorithm.beta", "algorithm.beta=0.5"),
    ],
    "smoothing_fits": [
        (
            lambda: config(algorithm=OFFLINE | {"loss": "dft", "label_smoothing": 0.1}),
            "algorithm.label_smoothing",
            "algorithm.label_smoothing=0",
        ),
    ],
    "sorted_loss_whole": [
        (
            lambda: config(algorithm=SORTING | {"loss": "aot"}),
            "algorithm.microbatch_size",
            "algorithm.microbatch_size=32",
        ),
        (
            lambda: config(algorithm=SORTING | {"loss": ["sigmoid", "aot_unpaired"]}),
            "algorithm.microbatch_size",
            "algorithm.microbatch_size=32",
        ),
        # one microbatch on each of two devices is two sorts
        (
            lambda: config(algorithm=SORTING | {"loss": "aot", "microbatch_size": 16}, trainer__devices=2),
            "trainer.devices",
            "trainer.devices=1",
        ),
    ],
    "runs_read": [
        (
            lambda: config(task={"_target_": "alignment.task.report.run"}),
            "runs",
            "runs=<folder of a run or of a sweep>",
        ),
        (lambda: config(runs="multirun/x"), "runs", "task=report runs=multirun/x"),
    ],
    "trainer_owned": [
        (lambda: config(trainer__max_steps=5), "trainer.max_steps", "algorithm.max_steps="),
        (lambda: config(trainer__max_epochs=5), "trainer.max_epochs", "algorithm.num_rollouts="),
        (lambda: config(trainer__accumulate_grad_batches=2), "trainer.accumulate_grad_batches", "microbatch_size"),
    ],
    "precision_known": [(lambda: config(trainer__precision="foo"), "trainer.precision", "trainer.precision=auto")],
    "rewards_given": [(lambda: config(reward={}), "reward", "reward=accuracy")],
    "data_has_form": [
        (
            lambda: config(algorithm=OFFLINE, data={"_target_": "toyrules.Prompts"}),
            "data",
            "data=jsonl data.path=<file>",
        ),
    ],
    "data_readable": [
        (lambda: config(data={"_target_": "toyrules.File", "path": "x.jsonl"}), "data.path", "data.path=<a file>"),
    ],
}
FLAT = [(name, *case) for name, cases in CASES.items() for case in cases]


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == {rule.__name__ for rule in rules.RULES}


@pytest.mark.parametrize(("name", "make", "key", "hint"), FLAT, ids=[f"{name}-{key}" for name, _, key, _ in FLAT])
def test_a_rule_refuses(name: str, make: Callable[[], dict[str, Any]], key: str, hint: str) -> None:
    """The one rule speaks, about the one key, and ends with what to type."""
    spoken = {rule.__name__: list(rule(make())) for rule in rules.RULES}
    assert [rule for rule, messages in spoken.items() if messages] == [name]
    (message,) = spoken[name]
    assert message.startswith(f"{key}: ")
    assert hint in re.split(r": type ", message)[-1]


@pytest.mark.parametrize(
    "cfg",
    [
        config,
        lambda: config(algorithm=OFFLINE),
        lambda: reference("Nothing", algorithm__beta=0),
        lambda: reference("Nothing", algorithm={"_target_": "toyrules.Free"}),
        lambda: reference("Adapter"),
        lambda: reference("Adapter", model__lora__init_lora_weights="pissa", model__adapter_path="runs/sft"),
        lambda: reference("Stored", algorithm=OFFLINE, model__lora__bias="all"),
        lambda: reference("Moving", algorithm=OFFLINE),
        lambda: config(model__lora__init_lora_weights="pissa"),
        served,
        lambda: config(algorithm=SAMPLING),
        lambda: served(model__lora__init_lora_weights="pissa", model__adapter_path="runs/sft"),
        lambda: config(data={"_target_": "toyrules.Prompts"}),
        lambda: config(algorithm__microbatch_size=4),
        lambda: config(algorithm__num_minibatches=2, trainer__devices=2, algorithm__microbatch_size=8),
        lambda: config(algorithm=OFFLINE, trainer__devices=2, trainer__num_nodes=2),
        lambda: config(algorithm=SORTING | {"loss": "aot", "microbatch_size": 32}),
        lambda: config(algorithm=SORTING | {"loss": ["sigmoid", "ipo"]}, trainer__devices=2),
        dict,
        lambda: (
            config(algorithm__group_size="eight", algorithm__lr="x", trainer__devices=True, seed=None) | {"data": 3}
        ),
    ],
)
def test_what_works_is_let_through(cfg: Callable[[], dict[str, Any]]) -> None:
    """The last one is for the signature check: rules say nothing about values of the wrong type."""
    assert [message for message in rules.problems(cfg()) if not message.startswith("trainer.devices")] == []


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_following_the_advice_ends_in_a_rollout_that_divides(devices: int) -> None:
    """Type what the message says until it is silent: then the arithmetic holds."""
    for minibatches, group, micro in itertools.product([1, 2, 3, 4], [2, 3, 6, 8], [1, 3, 5, 6, 16, 100]):
        cfg = config(trainer__devices=devices, algorithm__num_prompts=7)
        a = cfg["algorithm"]
        a |= {"group_size": group, "num_minibatches": minibatches, "microbatch_size": micro}
        while messages := list(rules.rollout_divides(cfg)):
            key, value = messages[0].rsplit("type algorithm.", 1)[1].split("=")
            assert a[key] != int(value), "the same advice again"
            a[key] = int(value)
        rows = a["num_prompts"] * group // devices
        assert a["num_prompts"] % devices == 0
        assert rows % (a["num_minibatches"] * a["microbatch_size"]) == 0
        assert a["microbatch_size"] % group == 0 or group % a["microbatch_size"] == 0


def test_each_advice_for_an_offline_batch_works() -> None:
    for micro in range(1, 40):
        for devices in (1, 2, 3):
            cfg = config(algorithm=OFFLINE | {"microbatch_size": micro}, trainer__devices=devices)
            for message in rules.batch_divides(cfg):
                for key, value in re.findall(r"algorithm\.(\w+)=(\d+)", message):
                    changed = cfg["algorithm"] | {key: int(value)}
                    assert changed["batch_size"] % (changed["microbatch_size"] * devices) == 0
