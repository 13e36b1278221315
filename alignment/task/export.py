"""`task=export`: a finished run as a plain Hugging Face folder with a model card."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import torch
import transformers
import yaml
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from alignment.callbacks.checkpoint import checkpoints
from alignment.config import build, external_problems
from alignment.errors import UserError
from alignment.experiment.card import Facts, licence_of, model_card
from alignment.model.adapters import ADAPTER_PARTS, CRITIC, POLICY, is_of_adapter
from alignment.model.critic import Critic
from alignment.model.export import write_adapter, write_critic, write_model
from alignment.model.hf import HFModel
from alignment.signatures import declared

log = logging.getLogger("alignment")
# Where the weights are those of a model that the hub has under this name.
ON_HUB = {"alignment.model.smollm2.SmolLM2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
# Terms under which the base was given, which go with it.
TERMS = ("LICENSE*", "NOTICE*", "USE_POLICY*")
Part = Literal["policy", "critic"]


def run(
    cfg: dict[str, Any],
    *,
    run: str,
    step: int | None,
    part: Part,
    to: str | None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"],
    merge: bool,
    base: str | None,
    license: str | None,
    push: str | None,
    private: bool,
) -> dict[str, Any]:
    """Write the folder, which is there only once it is whole; then upload it where asked. Returns where it is."""
    transformers.utils.logging.disable_progress_bar()
    trained = Trained(Path(run).expanduser().absolute(), step, part)
    target = _target(cfg)
    with trained.errors():
        loaded = load(trained, merge)
        number_format = _number_format(dtype, loaded, merge)
        with _in_one_step(target) as folder:
            notes = write(loaded, folder, merge, number_format, base)
            facts = gather(trained, loaded, dtype=number_format, merge=merge, base=base, licence=license)
            facts.notes += notes
            facts.place = push or facts.place
            (folder / "README.md").write_text(model_card(facts), encoding="utf-8")
    log.info("%s is in %s", "the model" if merge else "the adapter", target)
    if push:
        upload(target, push, private)
    return {"folder": str(target), "dtype": number_format, "output_dir": cfg["output_dir"]}


def problems(cfg: dict[str, Any]) -> list[str]:
    """What can be said before anything is loaded."""
    task, found = cfg["task"], external_problems(cfg)
    try:
        trained = Trained(Path(task["run"]).expanduser().absolute(), task["step"], task["part"])
        trained.check(task["merge"])
    except UserError as error:
        found.append(str(error))
    if os.path.lexists(_target(cfg)):
        found.append(f"task.to: {_target(cfg)} is there already, nothing is overwritten: type task.to=<new folder>")
    if task["push"] is None:
        return found
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", task["push"]):
        found.append(f"task.push: {task['push']} is no name of a repository: type task.push=<user>/<name>")
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        found.append("task.push: the hub cannot be reached (HF_HUB_OFFLINE): type task.push=null, and upload it later")
    elif huggingface_hub.get_token() is None:
        found.append("task.push: nobody is signed in to the hub: type hf auth login, or set HF_TOKEN")
    return found


def _target(cfg: Mapping[str, Any]) -> Path:
    to = cfg["task"]["to"]
    return Path(to).expanduser().absolute() if to else Path(cfg["output_dir"]).absolute() / "model"


# ---- the run -------------------------------------------------------------------------------------------------------
class Trained:
    """What a run left: its config, its numbers, and which weights are meant. UserError where it is no such run."""

    def __init__(self, folder: Path, step: int | None, part: str) -> None:
        self.folder, self.step, self.part = folder, step, part
        if not (folder / "config.yaml").is_file():
            raise UserError(f"task.run: {folder} holds no config.yaml, so it is no run: type task.run=outputs/<run>")
        self.config: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        self.algorithm: str = (self.config.get("algorithm") or {}).get("_target_", "")
        if (self.config.get("task") or {}).get("_target_") != "alignment.task.fit.run":
            raise UserError(f"task.run: {folder} has trained nothing: type task.run=<folder of a training run>")
        self.summary, self.manifest = self._json("summary.json"), self._json("manifest.json")

    def _json(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def scores(self) -> bool:
        """Whether it has trained a head of scores."""
        return not declared(self.algorithm, "samples", True)

    @property
    def head(self) -> dict[str, Any]:
        return {
            "num_labels": declared(self.algorithm, "num_labels", 1),
            "per_token": declared(self.algorithm, "per_token", False),
        }

    @property
    def checkpoint(self) -> Path | None:
        """The one that is meant; None = the weights are those of model/."""
        if self.step is None and self.part == "policy":
            return None
        found = {int(path.stem): path for path in checkpoints(self.folder / "checkpoints")}
        if not found:
            raise UserError(f"task.step: {self.folder} has no checkpoint: type task.step=null for its model/")
        if self.step is not None and self.step not in found:
            there = ", ".join(map(str, found))
            raise UserError(f"task.step: there is no checkpoint of step {self.step} (there are: {there}): type one")
        return found[self.step if self.step is not None else max(found)]

    @property
    def steps(self) -> int | None:
        """Optimizer steps behind the weights."""
        if self.checkpoint is not None:
            return int(self.checkpoint.stem)
        return int(self.summary["steps"]) if "steps" in self.summary else None

    @property
    def trained_adapter(self) -> bool:
        return (self.config.get("model") or {}).get("adapter") == "lora"

    def check(self, merge: bool) -> None:
        if self.part == "critic" and self.algorithm != "alignment.algorithm.ppo.PPO":
            raise UserError("task.part: only algorithm=ppo trains a critic: type task.part=policy")
        if self.part == "critic" and not merge:
            raise UserError("task.merge: a critic is written whole: type task.merge=true")
        if not merge and not self.trained_adapter:
            raise UserError("task.merge: the run has trained all weights, there is no adapter: type task.merge=true")
        if self.checkpoint is None and not self.model.is_dir():
            found = [int(path.stem) for path in checkpoints(self.folder / "checkpoints")]
            way = f"type task.step={found[-1]} for its last checkpoint, or" if found else "type"
            raise UserError(f"task.run: {self.folder} has not finished: {way} python run.py resume={self.folder}")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """What is wrong with the run's own settings cannot be put right by this command's keys of the same names."""
        try:
            yield
        except UserError as error:
            text = str(error)
            if text.startswith("task."):
                raise
            raise UserError(f"task.run: the model of {self.folder} cannot be exported as it was: {text}") from error


# ---- loading -------------------------------------------------------------------------------------------------------
@dataclass
class Loaded:
    """The weights that were trained, and what belongs to them. source: the model that training started from."""

    source: Any
    policy: nn.Module
    tokenizer: PreTrainedTokenizerBase
    stop_ids: set[int]
    critic: Critic | None = None


def load(trained: Trained, merge: bool) -> Loaded:
    """Build the model of the run, with what it has learned."""
    trained.check(merge)
    checkpoint = trained.checkpoint
    start = _source(trained)
    if checkpoint is not None:
        return _from_checkpoint(trained, start, checkpoint)
    saved: Any = AutoTokenizer.from_pretrained(trained.model)
    adapter = trained.model / "adapter" if trained.scores else trained.model
    if trained.trained_adapter and not (trained.scores and merge):
        own = _source(trained, adapter="lora", adapter_path=str(adapter))
        policy = own.scorer(**trained.head) if trained.scores else own.policy()
        return Loaded(start, policy.eval(), saved, own.stop_ids)
    trust = bool(trained.config["model"].get("trust_remote_code", False))
    whole = HFModel(str(trained.model), adapter="none", dtype="auto", trust_remote_code=trust)
    policy = whole.frozen_scorer(**trained.head) if trained.scores else whole.frozen()
    return Loaded(start, policy, saved, whole.stop_ids)


def _source(trained: Trained, **changes: Any) -> Any:
    """The run's model source, in 4 bit where the run's was."""
    source = build(trained.config["model"] | changes)
    build(trained.config["strategy"]).prepare(source)
    return source


def _from_checkpoint(trained: Trained, source: Any, checkpoint: Path) -> Loaded:
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    policy = source.scorer(**trained.head) if trained.scores else source.policy()
    critic = None
    if trained.part == "critic":
        kind = trained.config["algorithm"]["critic"]
        critic = Critic(("adapter" if source.adapter == "lora" else "model") if kind == "auto" else kind)
        critic.attach(source, policy)
        _take(critic, {name: t for name, t in state.items() if name.startswith("critic.")}, "critic.", checkpoint)
    names = (POLICY, CRITIC) if critic is not None and critic.kind == "adapter" else (POLICY,)
    _take(policy, {n: t for n, t in state.items() if _of_policy(n, names)}, "policy.", checkpoint)
    return Loaded(source, policy.eval(), source.tokenizer, source.stop_ids, critic)


def _of_policy(name: str, adapters: tuple[str, ...]) -> bool:
    """Whether a tensor of a checkpoint belongs to the policy, and to no other adapter on it than these."""
    of_base = not any(part in name for part in ADAPTER_PARTS)
    return name.startswith("policy.") and (of_base or any(is_of_adapter(name, one) for one in adapters))


@torch.no_grad()
def _take(module: nn.Module, state: Mapping[str, torch.Tensor], prefix: str, checkpoint: Path) -> None:
    """Load trained weights, all of them: one that is missing would silently stay what it was at the start."""
    found = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    wanted = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    unknown = module.load_state_dict(found, strict=False).unexpected_keys
    if lost := sorted(wanted - found.keys()) or unknown:
        raise UserError(f"task.step: {checkpoint} does not fit the run's model, see {lost[0]}: type another task.step")


def _number_format(asked: str, loaded: Loaded, merge: bool) -> str:
    """auto: as the base is on disk, which is what people who load it expect; an adapter stays as it was trained."""
    if asked != "auto":
        return asked
    if not merge:
        return "float32"
    source = loaded.source
    config = AutoConfig.from_pretrained(source.folder, trust_remote_code=source.trust_remote_code)
    known = config.dtype or config.get_text_config().dtype
    return str(known).removeprefix("torch.") if known else "float32"


# ---- writing -------------------------------------------------------------------------------------------------------
def write(loaded: Loaded, folder: Path, merge: bool, number_format: str, base: str | None) -> list[str]:
    """The files of the model; returns what its card has to say besides."""
    options: Any = {"dtype": getattr(torch, number_format)}
    notes = []
    if loaded.critic is not None:
        write_critic(loaded.critic, loaded.policy, folder, loaded.tokenizer, stop_ids=loaded.stop_ids, **options)
    elif merge:
        if not write_model(loaded.policy, folder, loaded.tokenizer, stop_ids=loaded.stop_ids, **options):
            notes.append("Input and output embeddings were tied in the base and are not any more.")
    else:
        assert isinstance(loaded.policy, PeftModel), "check() has looked for an adapter"
        write_adapter(loaded.policy, folder, loaded.tokenizer, base=base or loaded.source.folder, **options)
    for pattern in TERMS:
        for file in Path(loaded.source.folder).glob(pattern):
            shutil.copyfile(file, folder / file.name)
    return notes


def gather(
    trained: Trained, loaded: Loaded, *, dtype: str, merge: bool, base: str | None, licence: str | None
) -> Facts:
    """What the card says. Of a checkpoint, the numbers of the run's end are not its own."""
    kind = "critic" if trained.part == "critic" else "language model"
    if trained.scores:
        kind = "step scorer" if trained.head["per_token"] else "scorer"
    final = trained.steps == trained.summary.get("steps")
    notes = []
    if _strategy(trained).endswith(".QLoRA"):
        rounded = "The weights are the sum of the base as it was rounded to 4 bit in training, and the adapter."
        notes.append(rounded if merge else "It was trained on a base in 4 bit: load the base so.")
    return Facts(
        name=_name(trained),
        kind=kind,
        config=trained.config,
        summary=trained.summary if final else {},
        manifest=trained.manifest,
        step=trained.steps,
        dtype=dtype,
        merged=merge,
        base=base or ON_HUB.get(trained.config["model"]["_target_"]) or loaded.source.folder,
        licence=licence or licence_of(Path(loaded.source.folder)),
        num_labels=trained.head["num_labels"],
        notes=notes,
    )


def _strategy(trained: Trained) -> str:
    return str((trained.config.get("strategy") or {}).get("_target_", ""))


def _name(trained: Trained) -> str:
    """Of a folder such as outputs/2026-12-01/10-20-30: what was trained on what."""
    words = [trained.config["model"]["_target_"], trained.algorithm]
    return "-".join(word.rpartition(".")[2] for word in words) + ("-critic" if trained.part == "critic" else "")


@contextmanager
def _in_one_step(target: Path) -> Iterator[Path]:
    """A folder beside the target to write into: it gets the target's name when all is written, or goes away."""
    if os.path.lexists(target):
        raise UserError(f"task.to: {target} is there already, nothing is overwritten: type task.to=<new folder>")
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name}.partial")
    if folder.exists():  # of an export that was killed
        shutil.rmtree(folder)
    folder.mkdir()
    try:
        yield folder
        os.rename(folder, target)
    finally:
        if folder.exists():
            shutil.rmtree(folder)


def upload(folder: Path, repository: str, private: bool) -> None:
    """Make the repository if there is none, and upload the folder as one commit. The folder stays if that fails."""
    api = huggingface_hub.HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.name}")
    except Exception as error:  # of the hub, the network and the disk: whatever it is, the folder is there
        raise UserError(
            f"task.push: {repository} was not uploaded ({type(error).__name__}: {str(error).strip()[:500]}). The model "
            f"is in {folder}: type hf upload {repository} {folder} to try again"
        ) from error
    log.info("uploaded to %s/%s", api.endpoint, repository)
