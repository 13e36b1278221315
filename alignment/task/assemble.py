"""From a composed config to a module, its data and a Trainer: what every task that runs a model needs."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from alignment.algorithm.base import AlignmentModule
from alignment.batch import Example
from alignment.callbacks.checkpoint import AtomicCheckpointIO, BoundaryCheckpoint
from alignment.callbacks.guards import Guards
from alignment.callbacks.metrics import MetricsCallback
from alignment.callbacks.off_policy import OffPolicyWatch
from alignment.callbacks.progress import RunProgress
from alignment.callbacks.ref_logprob import RefLogprobCallback
from alignment.callbacks.rollout import RolloutCallback
from alignment.callbacks.samples import SamplesCallback
from alignment.callbacks.student_samples import StudentSamples
from alignment.config import build
from alignment.data.datamodule import AlignmentData, OfflineData, OnlineData
from alignment.data.prepare import prepare
from alignment.data.store import ExampleFile, described
from alignment.errors import UserError
from alignment.experiment.record import Samples
from alignment.reward.combine import RewardSet
from alignment.rules import says
from alignment.strategy.precision import pick_precision

log = logging.getLogger("alignment")


@dataclass
class Assembly:
    """One run, ready to start."""

    module: AlignmentModule
    data: AlignmentData
    trainer: L.Trainer
    samples: Samples
    evaluate_every: int  # optimizer steps

    @property
    def sets(self) -> dict[str, Sequence[Example]]:
        """The sets of examples by the names of their reports; the prompts that are learned from are `train` too."""
        learned = {"train": self.data.prompts} if isinstance(self.data, OnlineData) else {}
        return {name: learned.get(name) or getattr(self.data, name) for name in self.data.reports}

    @property
    def fingerprints(self) -> dict[str, Any]:
        """One hash per set of examples: equal hashes mean equal rows, tokens and order. And what became of the rows."""
        sets = {name: getattr(self.data, name, ()) for name in ("train", "prompts", "heldout", "heldout_prompts")}
        return {name: fingerprint(rows) for name, rows in sets.items() if rows} | {"rows": self.data.reports}


def fingerprint(examples: Sequence[Example]) -> str:
    if isinstance(examples, ExampleFile):  # known since it was written
        return f"{len(examples)} examples, sha256 {examples.content[:16]}"
    digest = hashlib.sha256()
    for example in examples:
        digest.update(described(example))
    return f"{len(examples)} examples, sha256 {digest.hexdigest()[:16]}"


def assemble(cfg: dict[str, Any], loggers: list) -> Assembly:
    """Build everything of a validated config. No weight is loaded before the Trainer asks for the model."""
    folder, world_size = Path(cfg["output_dir"]), cfg["trainer"]["devices"] * cfg["trainer"]["num_nodes"]
    source = build(cfg["model"])
    precision, reason = pick_precision(
        cfg["trainer"]["precision"], accelerator=cfg["trainer"]["accelerator"], tiny=source.tiny
    )
    log.info("precision %s: %s", precision, reason)
    source.compact_for(precision)
    strategy = build(cfg["strategy"])
    strategy.prepare(source)
    module = build_module(cfg, source)
    data = build_data(cfg, module)
    samples = Samples(folder)
    callbacks = [
        SamplesCallback(samples, num_shown=4 if cfg["trainer"]["enable_progress_bar"] else 0),
        BoundaryCheckpoint(folder / "checkpoints", online=module.online, **cfg["checkpoint"]),
    ]
    if cfg["trainer"]["enable_progress_bar"]:
        callbacks.append(RunProgress(module.total_steps))
    devices = strategy.trainer_arguments(accelerator=cfg["trainer"]["accelerator"], world_size=world_size)
    trainer = build_trainer(cfg, module, callbacks, loggers, precision=precision, devices=devices)
    every = cfg["evaluation"]["every"] * steps_per_rollout(cfg, module.online)
    return Assembly(module, data, trainer, samples, every)


def assembly_problems(cfg: dict[str, Any]) -> list[str]:
    """What the parts of a run refuse when they are made, all of it: no weight is loaded and no row is read."""
    found, parts = part_problems(cfg, scorer=not says(cfg, "algorithm", "samples", True))
    if not found:
        passed = {"source": parts["model"], "reference": parts["ref_strategy"], "optimizer": parts["optimizer"]}
        _made(found, lambda: build(cfg["algorithm"], callbacks=[], **passed))
    return found


def part_problems(cfg: dict[str, Any], *, scorer: bool = False) -> tuple[list[str], dict[str, Any]]:
    """The same for all but the algorithm, and the parts. scorer: the model is to carry a head of scores."""
    found: list[str] = []
    groups = ("model", "ref_strategy", "optimizer", "rollout", "data")
    parts = {group: _made(found, lambda group=group: build(cfg[group])) for group in groups}
    if parts["model"] is not None:
        _made(found, lambda: parts["model"].check(scorer=scorer))
    for node in cfg["reward"].values():
        reward = _made(found, lambda node=node: build(node))
        if hasattr(reward, "close"):
            reward.close()
    return found, parts


def _made(found: list[str], make: Callable[[], Any]) -> Any:
    """What `make` returns; None where it refuses, with the reason added to `found`."""
    try:
        return make()
    except UserError as error:
        found.append(str(error))
        return None


def build_module(cfg: dict[str, Any], source) -> AlignmentModule:
    engine = build(cfg["rollout"])
    rewards = RewardSet({name: (reward := build(node), reward.weight) for name, node in cfg["reward"].items()})
    rollout = RolloutCallback(
        engine,
        rewards,
        seed=cfg["seed"],
        num_eval_samples=cfg["evaluation"]["num_samples"],
        eval_temperature=cfg["evaluation"]["temperature"],
    )
    module = build(
        cfg["algorithm"],
        source=source,
        reference=build(cfg["ref_strategy"]),
        optimizer=build(cfg["optimizer"]),
        callbacks=[
            rollout,
            StudentSamples(rollout),
            RefLogprobCallback(),
            OffPolicyWatch(),
            MetricsCallback(),
            Guards(**cfg["guards"]),  # reads what the callback before it has logged
        ],
    )
    if module.online:
        module.temperature, module.max_new_tokens = engine.temperature, engine.max_new_tokens
        module.reward_weights = rewards.weights
    return module


def build_data(cfg: dict[str, Any], module: Any) -> AlignmentData:
    """Load, tokenise and plan; sets `module.total_steps`."""
    evaluation, algorithm = cfg["evaluation"], cfg["algorithm"]
    prepared = prepare(
        build(cfg["data"]),
        module.data_form,
        module.source,
        num_prompts=evaluation["num_prompts"] if module.samples else 0,
        with_heldout=not module.online,
        encoding=cfg["encoding"],
        cleaning=cfg["cleaning"],
    )
    common = {"eval_batch_size": evaluation["batch_size"], "seed": cfg["seed"]}
    if module.online:
        module.total_steps = module.num_rollouts * module.steps_per_rollout
        data: AlignmentData = OnlineData(
            prepared.train,
            prepared.heldout_prompts,
            num_prompts=algorithm["num_prompts"],
            num_microbatches=algorithm["num_prompts"] * module.num_learned // _rows_per_pass(cfg),
            num_iterations=algorithm["num_iterations"],
            **common,
        )
    else:
        steps = math.ceil(module.num_epochs * len(prepared.train) / module.batch_size)
        module.total_steps = module.max_steps or steps
        data = OfflineData(
            prepared.train,
            prepared.heldout,
            prepared.heldout_prompts,
            batch_size=algorithm["batch_size"],
            microbatch_size=algorithm["microbatch_size"],
            total_steps=module.total_steps,
            length_window=module.length_window,
            **common,
        )
    data.reports = prepared.reports
    return data


def _rows_per_pass(cfg: dict[str, Any]) -> int:
    """Rows of one microbatch on all devices together."""
    return cfg["algorithm"]["microbatch_size"] * cfg["trainer"]["devices"] * cfg["trainer"]["num_nodes"]


def accumulation(cfg: dict[str, Any], module: Any) -> int:
    """Microbatches of one optimizer step on one device."""
    algorithm = cfg["algorithm"]
    if not module.online:
        return algorithm["batch_size"] // _rows_per_pass(cfg)
    return algorithm["num_prompts"] * module.num_learned // algorithm["num_minibatches"] // _rows_per_pass(cfg)


def steps_per_rollout(cfg: dict[str, Any], online: bool) -> int:
    """Optimizer steps between two points at which a run can be evaluated: 1 where there are no rollouts."""
    return cfg["algorithm"]["num_iterations"] * cfg["algorithm"]["num_minibatches"] if online else 1


def build_trainer(
    cfg: dict[str, Any],
    module: AlignmentModule,
    callbacks: list[Callback],
    loggers: list,
    *,
    precision: str,
    devices: dict[str, Any],
) -> L.Trainer:
    arguments = cfg["trainer"] | {"precision": precision}
    accumulate, every = accumulation(cfg, module), cfg["evaluation"]["every"]
    return L.Trainer(
        **arguments,
        **devices,
        **schedule(module, accumulate, every),
        accumulate_grad_batches=accumulate,
        callbacks=callbacks,
        logger=loggers,
        plugins=[AtomicCheckpointIO()],
        default_root_dir=cfg["output_dir"],
        use_distributed_sampler=False,
        inference_mode=False,  # a tensor born in it (the sampler's copy of the weights) could never be written again
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def schedule(module: Any, accumulate: int, every: int) -> dict[str, Any]:
    """How long, and when to evaluate. Online runs are bounded by epochs: with max_steps a resumed run would skip its
    rollout. Offline runs are one epoch of `total_steps` steps."""
    if module.online:
        return {"max_epochs": module.num_rollouts, "check_val_every_n_epoch": every}
    batches = module.total_steps * accumulate
    return {"max_epochs": 1, "val_check_interval": min(every * accumulate, batches)}
