"""Combinations and numbers that cannot work, each a small function in `RULES` that yields messages.

A rule gets the plain config. It stays silent where a key it reads is absent or of the wrong type: that is reported by
the signature check. Every message is `key: what is wrong: type what-to-type`. What an algorithm or a reference strategy
needs is declared on its class and read here without importing it.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from alignment.signatures import declared

Config = Mapping[str, Any]

# Numbers by the last name of their key: in words (for the message), and the check.
BOUNDS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "beta": ("at least 0", lambda x: 0 <= x < math.inf),
    "mixture_coef": ("at least 0 and at most 1", lambda x: 0 <= x <= 1),
    "clip_eps": ("at least 0 and less than 1", lambda x: 0 <= x < 1),
    "clip_eps_high": ("at least 0", lambda x: 0 <= x < math.inf),
    "lmbda": ("at least 0 and at most 1", lambda x: 0 <= x <= 1),
    "neftune_alpha": ("at least 0", lambda x: 0 <= x < math.inf),
    "missing_eos_penalty": ("at least 0", lambda x: 0 <= x < math.inf),
    "top_entropy": ("more than 0 and at most 1", lambda x: 0 < x <= 1),
    "sampler_ratio_max": ("more than 0", lambda x: 0 < x < math.inf),
    "sampler_ratio_min": ("at least 0", lambda x: 0 <= x < math.inf),
    "gamma": ("more than 0 and at most 1", lambda x: 0 < x <= 1),
    "gae_lambda": ("at least 0 and at most 1", lambda x: 0 <= x <= 1),
    "dual_clip": ("more than 1", lambda x: 1 < x < math.inf),
    "value_clip_eps": ("more than 0, or null for no clipping", lambda x: 0 < x < math.inf),
    "reward_clip": ("more than 0, or null for no clipping", lambda x: 0 < x < math.inf),
    "vf_coef": ("at least 0", lambda x: 0 <= x < math.inf),
    "entropy_coef": ("at least 0", lambda x: 0 <= x < math.inf),
    "target_kl_per_sequence": ("more than 0", lambda x: 0 < x < math.inf),
    "critic_lr": ("more than 0", lambda x: 0 < x < math.inf),
    "label_smoothing": ("at least 0 and at most 0.5", lambda x: 0 <= x <= 0.5),
    "desirable_weight": ("at least 0", lambda x: 0 <= x < math.inf),
    "undesirable_weight": ("at least 0", lambda x: 0 <= x < math.inf),
    "max_kl": ("more than 0, or null", lambda x: 0 < x < math.inf),
    "lr": ("more than 0", lambda x: 0 < x < math.inf),
    "weight_decay": ("at least 0", lambda x: 0 <= x < math.inf),
    "warmup_ratio": ("at least 0 and at most 1", lambda x: 0 <= x <= 1),
    "num_epochs": ("more than 0", lambda x: 0 < x < math.inf),
    "temperature": ("more than 0", lambda x: 0 < x < math.inf),
    "timeout": ("more than 0", lambda x: 0 < x < math.inf),
    "top_p": ("more than 0 and at most 1", lambda x: 0 < x <= 1),
    "top_k": ("at least 0 (0 = all tokens)", lambda x: x >= 0),
    "seed": ("at least 0 and at most 4294967295", lambda x: 0 <= x < 2**32),
    "gradient_clip_val": ("more than 0, or null for no clipping", lambda x: 0 < x < math.inf),
}
EVALUATION_TEMPERATURE = ("at least 0 (0 = greedy)", lambda x: 0 <= x < math.inf)
# Whole numbers of at least 1 wherever they stand; other names in num_ may be 0, and so may evaluation.num_prompts.
COUNTS = {
    "num_prompts",
    "batch_size",
    "microbatch_size",
    "length_window",
    "group_size",
    "max_steps",
    "num_rollouts",
    "num_minibatches",
    "num_iterations",
    "num_kept",
    "max_draws",
    "num_samples",
    "num_nodes",
    "devices",
    "max_new_tokens",
    "kl_horizon",
    "max_batch",
    "max_requests",
    "num_tries",
    "head_chunk_tokens",
    "max_prompt_tokens",
    "max_completion_tokens",
    "ngram",
    "every",
    "log_every_n_steps",
}

# Arguments of the Trainer that follow from other keys, and the keys to use.
TRAINER_OWNED: dict[str, str] = {
    "max_epochs": "algorithm.num_rollouts=<n> (on-policy algorithms) or algorithm.num_epochs=<n>",
    "min_epochs": "algorithm.num_rollouts=<n> (on-policy algorithms) or algorithm.num_epochs=<n>",
    "max_steps": "algorithm.max_steps=<n> (offline algorithms) or algorithm.num_rollouts=<n>",
    "min_steps": "algorithm.max_steps=<n> (offline algorithms) or algorithm.num_rollouts=<n>",
    "accumulate_grad_batches": "algorithm.microbatch_size=<n>, with algorithm.batch_size or algorithm.num_minibatches",
    "strategy": "strategy=<option>",
    "logger": "logger=<option>",
    "callbacks": "~trainer.callbacks, or leave it out: the algorithm's code lists them",
    "plugins": "strategy=<option>",
    "use_distributed_sampler": "~trainer.use_distributed_sampler, or leave it out: the data module shards by rank",
    "reload_dataloaders_every_n_epochs": "~trainer.reload_dataloaders_every_n_epochs, or leave it out",
    "check_val_every_n_epoch": "evaluation.every=<n>",
    "val_check_interval": "evaluation.every=<n>",
    "num_sanity_val_steps": "evaluation.num_prompts=<n>",
    "limit_val_batches": "evaluation.num_prompts=<n>",
    "enable_checkpointing": "checkpoint.every=<n>",
    "enable_model_summary": "~trainer.enable_model_summary, or leave it out",
    "default_root_dir": "output_dir=<folder>",
}


def problems(cfg: Config) -> list[str]:
    """Messages of every rule."""
    return [message for rule in RULES for message in rule(cfg)]


# ---- reading the config --------------------------------------------------------------------------------------------
def get(cfg: Config, key: str, default: Any = None) -> Any:
    value: Any = cfg
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def number(cfg: Config, key: str) -> float | None:
    value = get(cfg, key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def count(cfg: Config, key: str) -> int | None:
    value = get(cfg, key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def says(cfg: Config, group: str, name: str, default: Any) -> Any:
    """What the chosen class of a group declares."""
    target = get(cfg, f"{group}._target_")
    return declared(target, name, default) if isinstance(target, str) else default


def algorithm_name(cfg: Config) -> str:
    return str(get(cfg, "algorithm._target_", "the algorithm")).rpartition(".")[2]


def world_size(cfg: Config) -> int | None:
    devices, nodes = count(cfg, "trainer.devices"), count(cfg, "trainer.num_nodes")
    return devices * nodes if devices and nodes else None


def learned_per_prompt(cfg: Config) -> int | None:
    """Completions of one prompt that are learned from: all that are sampled, unless the class says otherwise."""
    rows = says(cfg, "algorithm", "rows_per_prompt", "group_size")
    return rows if isinstance(rows, int) else count(cfg, f"algorithm.{rows}")


def needs_reference(cfg: Config) -> bool:
    need = says(cfg, "algorithm", "reference_need", "optional")
    return need == "required" or (need == "beta" and (number(cfg, "algorithm.beta") or 0) > 0)


def _only_speaks(cfg: Config) -> bool:
    """A task that trains nothing: what an algorithm needs to learn is not asked for."""
    return get(cfg, "task._target_") in {f"alignment.task.{name}.run" for name in ("generate", "evaluate", "chat")}


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _leaves(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, node


def _numbers(cfg: Config) -> Iterator[tuple[str, float]]:
    for key, value in _leaves(cfg):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield key, value


# ---- rules ---------------------------------------------------------------------------------------------------------
def text_none(cfg: Config) -> Iterator[str]:
    """Hydra reads `None` as text, which is true wherever it is tested."""
    for key, value in _leaves(cfg):
        if value == "None":
            yield f"{key}: 'None' is read as text: type {key}=null"


def numbers_in_range(cfg: Config) -> Iterator[str]:
    for key, value in _numbers(cfg):
        name = key.rpartition(".")[2]
        if name in BOUNDS:
            measures = key.startswith(("evaluation.", "reward."))
            greedy = measures or (key == "rollout.temperature" and _only_speaks(cfg))
            words, holds = EVALUATION_TEMPERATURE if greedy else BOUNDS[name]
            if not holds(value):
                words = words if math.isfinite(value) else f"finite, {words}"
                yield f"{key}: {value} must be {words}: type {key}=<a number, {words}>"


def counts_positive(cfg: Config) -> Iterator[str]:
    for key, value in _numbers(cfg):
        name = key.rpartition(".")[2]
        smallest = 1 if name in COUNTS and key != "evaluation.num_prompts" else 0
        if (name in COUNTS or name.startswith("num_")) and name not in BOUNDS and not value >= smallest:
            yield f"{key}: {value} must be at least {smallest}: type {key}=<a whole number, at least {smallest}>"


def devices_counted(cfg: Config) -> Iterator[str]:
    value = get(cfg, "trainer.devices")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        yield f"trainer.devices: {value!r} must be a number, batch sizes are divided by it: type trainer.devices=1"


def checkpoints_kept(cfg: Config) -> Iterator[str]:
    keep = number(cfg, "checkpoint.keep")
    if keep is not None and keep != -1 and keep < 1:
        yield f"checkpoint.keep: {keep} would keep none: type checkpoint.keep=1, or checkpoint.keep=-1 for all"


def reference_provided(cfg: Config) -> Iterator[str]:
    if needs_reference(cfg) and not says(cfg, "ref_strategy", "provides_reference", True):
        ways = "ref_strategy=lora or ref_strategy=frozen"
        if says(cfg, "algorithm", "reference_need", "") == "beta":
            ways += ", or algorithm.beta=0 to do without"
        yield f"ref_strategy: {algorithm_name(cfg)} compares the policy with a reference and there is none: type {ways}"


def reference_known_in_advance(cfg: Config) -> Iterator[str]:
    if says(cfg, "ref_strategy", "offline_only", False) and says(cfg, "algorithm", "online", False):
        yield (
            f"ref_strategy: {algorithm_name(cfg)} learns from samples that do not exist before training, so that their"
            " reference log-probs cannot be stored in advance: type ref_strategy=lora or ref_strategy=frozen"
        )


def moving_reference_used(cfg: Config) -> Iterator[str]:
    if says(cfg, "ref_strategy", "moves", False) and not needs_reference(cfg):
        ways = "ref_strategy=none"
        if says(cfg, "algorithm", "reference_need", "") == "beta":
            ways += ", or algorithm.beta=<a number more than 0>"
        yield f"ref_strategy: the reference follows the policy, but nothing in the loss reads it: type {ways}"


def planned_steps(cfg: Config) -> int | None:
    """Optimizer steps of a run, where its config alone tells."""
    if not says(cfg, "algorithm", "online", False):
        return count(cfg, "algorithm.max_steps")
    rollouts = count(cfg, "algorithm.num_rollouts")
    return rollouts and rollouts * steps_per_rollout(cfg)


def steps_per_rollout(cfg: Config) -> int:
    return (count(cfg, "algorithm.num_iterations") or 1) * (count(cfg, "algorithm.num_minibatches") or 1)


def adapter_for_reference(cfg: Config) -> Iterator[str]:
    adapter = get(cfg, "model.adapter", "none") if "model" in cfg else "not known"
    if says(cfg, "ref_strategy", "needs_adapter", False) and adapter in (None, "none"):
        without = "ref_strategy=frozen" if needs_reference(cfg) else "ref_strategy=none"
        yield (
            "ref_strategy: the reference is the policy with its adapter switched off, but model.adapter=none trains all"
            f" weights: type model.adapter=lora or {without}"
        )


def adapter_for_strategy(cfg: Config) -> Iterator[str]:
    """Weights in 4 bit cannot be trained themselves, and heads of scores are not read from them."""
    if not says(cfg, "strategy", "needs_adapter", False):
        return
    if "model" in cfg and get(cfg, "model.adapter", "none") in (None, "none"):
        yield "strategy: weights in 4 bit cannot be trained, as model.adapter=none would: type model.adapter=lora"
    if not says(cfg, "algorithm", "samples", True):
        yield f"strategy: {algorithm_name(cfg)} trains a head of scores, not on weights in 4 bit: type strategy=auto"


def adapter_for_critic(cfg: Config) -> Iterator[str]:
    adapter = get(cfg, "model.adapter", "none") if "model" in cfg else "not known"
    if get(cfg, "algorithm.critic") == "adapter" and adapter in (None, "none"):
        yield (
            "algorithm.critic: its adapter would share a base that model.adapter=none trains: type"
            " algorithm.critic=model, or model.adapter=lora"
        )


def adapter_leaves_base_alone(cfg: Config) -> Iterator[str]:
    """Such an initialisation, or trained biases, change weights that stay when the adapter is switched off.

    A stored reference is computed once, before training, with the adapter off: only the initialisation matters to it.
    An adapter that training starts from is kept as a second adapter: how a fresh one would start does not matter then.
    """
    while_training = says(cfg, "ref_strategy", "needs_adapter", False)
    switches_off = while_training or says(cfg, "ref_strategy", "offline_only", False)
    if not switches_off or get(cfg, "model.adapter") in (None, "none"):
        return
    init, bias = get(cfg, "model.lora.init_lora_weights"), get(cfg, "model.lora.bias", "none")
    changes_base = isinstance(init, str) and init.lower().startswith(("pissa", "olora", "loftq", "corda", "eva"))
    if changes_base and get(cfg, "model.adapter_path") is None:
        yield (
            f"model.lora.init_lora_weights: {init} changes the base weights, so the policy without its adapter is not"
            " the model training started from: type ref_strategy=frozen, or model.lora.init_lora_weights=true"
        )
    if while_training and bias not in (None, "none"):
        yield (
            f"model.lora.bias: bias={bias} trains biases of the base, which stay when the adapter is switched off: type"
            " ref_strategy=frozen, or model.lora.bias=none"
        )


def policy_can_be_served(cfg: Config) -> Iterator[str]:
    """An engine outside this process has the base from its folder and gets what is trained: nothing else may change."""
    if not says(cfg, "rollout", "other_process", False):
        return
    if says(cfg, "algorithm", "samples_in_process", False):
        yield (
            f"rollout: {algorithm_name(cfg)} samples from models that the server is not sent, or at every step: type"
            " rollout=hf"
        )
    if get(cfg, "model.adapter", "none") in (None, "none"):
        return
    plain = {"use_dora": False, "modules_to_save": None, "bias": "none"}
    for name, value in plain.items():
        if get(cfg, f"model.lora.{name}", value) not in (value, None, False, []):
            told = {False: "false", None: "null"}.get(value, value)
            yield f"model.lora.{name}: a vLLM server cannot load such an adapter: type model.lora.{name}={told}"
    init = get(cfg, "model.lora.init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(("pissa", "olora")) and not get(cfg, "model.adapter_path"):
        yield (
            f"model.lora.init_lora_weights: {init} changes the base weights, and the server keeps those of the folder:"
            " type model.lora.init_lora_weights=true, or rollout=hf"
        )


def group_large_enough(cfg: Config) -> Iterator[str]:
    size, smallest = count(cfg, "algorithm.group_size"), says(cfg, "algorithm", "min_group", 1)
    if size is not None and size < smallest:
        yield (
            f"algorithm.group_size: {algorithm_name(cfg)} compares the samples of one prompt with each other, {size} is"
            f" too few: type algorithm.group_size={smallest} or more"
        )


def rollout_divides(cfg: Config) -> Iterator[str]:
    """Each device gets whole prompts, each optimizer step whole microbatches, each microbatch whole groups or an even
    part of one."""
    keys = ("num_prompts", "microbatch_size", "num_minibatches")
    values, world = [learned_per_prompt(cfg), *(count(cfg, f"algorithm.{key}") for key in keys)], world_size(cfg)
    if not says(cfg, "algorithm", "online", False) or world is None or None in values:
        return
    group, prompts, micro, minibatches = (int(value or 0) for value in values)
    if (count(cfg, "algorithm.group_size") or 1) < says(cfg, "algorithm", "min_group", 1):
        return
    if prompts % world:
        yield (
            f"algorithm.num_prompts: {prompts} prompts cannot be shared evenly by {world} devices: type"
            f" algorithm.num_prompts={_multiple(prompts, world)}"
        )
        return
    rows = prompts * group // world
    sizes = [size for size in range(1, rows + 1) if _fits(size, rows, group, minibatches)]
    if micro in sizes:
        return
    what = f"{prompts} prompts x {group} samples on {world} device(s) in {minibatches} minibatch(es)"
    if not sizes:
        yield (
            f"algorithm.num_minibatches: {what} cannot be cut evenly: type algorithm.num_minibatches="
            f"{max(n for n in range(1, minibatches + 1) if rows % n == 0)}"
        )
        return
    nearest = max([size for size in sizes if size <= micro], default=min(sizes))
    yield (
        f"algorithm.microbatch_size: {what} cannot be cut into microbatches of {micro} that hold whole groups or an"
        f" equal part of one: type algorithm.microbatch_size={nearest}"
    )


def overlong_fits(cfg: Config) -> Iterator[str]:
    """The slope of the length penalty ends at the longest completion, so it cannot be longer than that."""
    slope, longest = get(cfg, "algorithm.overlong_tokens"), count(cfg, "rollout.max_new_tokens")
    if isinstance(slope, int) and longest and not 0 < slope <= longest:
        yield (
            f"algorithm.overlong_tokens: {slope} is not between 1 and rollout.max_new_tokens={longest}: type"
            f" algorithm.overlong_tokens={max(1, longest // 5)}, or null for no penalty"
        )


def _fits(size: int, rows: int, group: int, minibatches: int) -> bool:
    return rows % (size * minibatches) == 0 and (size % group == 0 or group % size == 0)


def _multiple(value: int, of: int) -> int:
    return max(of, value // of * of)


def resumed_run_goes_on(cfg: Config) -> Iterator[str]:
    """A run cannot be taken back: its config would then tell of fewer steps than it made."""
    if not get(cfg, "resume"):
        return
    done = max((int(file.stem) for file in Path(str(cfg["resume"]), "checkpoints").glob("*.ckpt")), default=0)
    online = says(cfg, "algorithm", "online", False)
    key, per = ("algorithm.num_rollouts", steps_per_rollout(cfg)) if online else ("algorithm.max_steps", 1)
    if (planned_steps(cfg) or done) < done:
        asked, made = get(cfg, key), math.ceil(done / per)
        yield f"{key}: {asked} is less than the {made} that this run has made: type {key}=<at least {made}>"


def batch_divides(cfg: Config) -> Iterator[str]:
    batch, micro = count(cfg, "algorithm.batch_size"), count(cfg, "algorithm.microbatch_size")
    world = world_size(cfg)
    if says(cfg, "algorithm", "online", False) or not (batch and micro and world) or batch % (micro * world) == 0:
        return
    if batch % world == 0 and micro > 1:
        nearest = max(size for size in range(1, micro + 1) if batch % (size * world) == 0)
        hint = f"algorithm.microbatch_size={nearest} or algorithm.batch_size={_multiple(batch, micro * world)}"
    else:
        hint = f"algorithm.batch_size={_multiple(batch, micro * world)}"
    yield (
        f"algorithm.batch_size: {batch} cannot be cut into microbatches of {micro} on {world} device(s): type {hint}"
    )


def sorted_loss_whole(cfg: Config) -> Iterator[str]:
    """A loss that compares quantiles of the pairs of a step is no sum over its microbatches."""
    chosen, world = get(cfg, "algorithm.loss"), world_size(cfg)
    batch, micro = count(cfg, "algorithm.batch_size"), count(cfg, "algorithm.microbatch_size")
    names = chosen if isinstance(chosen, (list, tuple)) else [chosen]
    sorts = [name for name in names if name in says(cfg, "algorithm", "sorted_losses", ())]
    if not sorts or not (batch and micro and world):
        return
    why = f"{sorts[0]} sorts the pairs of an optimizer step, which has to be whole"
    if world > 1:
        yield f"trainer.devices: {why}, and {world} devices would each sort their own: type trainer.devices=1"
    elif micro != batch:
        yield (
            f"algorithm.microbatch_size: {why}, but {batch} pairs are cut into microbatches of {micro}: type"
            f" algorithm.microbatch_size={batch}"
        )


def trainer_owned(cfg: Config) -> Iterator[str]:
    for name in get(cfg, "trainer", {}):
        if name in TRAINER_OWNED:
            hint = TRAINER_OWNED[name]
            yield f"trainer.{name}: follows from other keys, a second value would contradict them: type {hint}"


def rewards_given(cfg: Config) -> Iterator[str]:
    if _only_speaks(cfg):
        return
    if says(cfg, "algorithm", "online", False) and "reward" in cfg and not cfg["reward"]:
        yield f"reward: {algorithm_name(cfg)} learns from rewards of its samples, none is chosen: type reward=accuracy"


def _sources(cfg: Config) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(key, node) of the data, and of every source that a mixture is made of."""
    for key, node in (("data", get(cfg, "data")), *_inner("data.sources", get(cfg, "data.sources"))):
        if isinstance(node, Mapping) and isinstance(node.get("_target_"), str):
            yield key, node


def _inner(key: str, nodes: Any) -> list[tuple[str, Any]]:
    return [(f"{key}.{name}", node) for name, node in nodes.items()] if isinstance(nodes, Mapping) else []


def _placed(message: str, key: str, node: Mapping[str, Any]) -> str:
    """A source's message, which speaks of `data.path`, with its keys where they are."""
    if key == "data":
        return message
    message = re.sub(r"\bdata=(?=\w)", f"data@{key}=", message)
    message = re.sub(rf"\bdata\.(?=(?:{'|'.join(map(re.escape, node))})\b)", f"{key}.", message)
    return message if message.startswith(key) else f"{key}: {message.removeprefix('data: ')}"


def data_has_form(cfg: Config) -> Iterator[str]:
    """Sources that can make only some forms of data declare them; those that do not are asked when they load."""
    form = says(cfg, "algorithm", "data_form", "prompts")
    for key, node in _sources(cfg):
        forms = declared(node["_target_"], "forms", None)
        if forms is not None and form not in forms:
            source = node["_target_"].rpartition(".")[2]
            message = (
                f"data: {source} has {', '.join(forms)}, but {algorithm_name(cfg)} learns from {form}: type data=jsonl"
                " data.path=<file>, or choose another algorithm"
            )
            yield _placed(message, key, {"path": None})


def data_readable(cfg: Config) -> Iterator[str]:
    """Sources that say they can check their file without heavy imports do so now, not after the model has loaded."""
    for key, node in _sources(cfg):
        if declared(node["_target_"], "checks_itself", False):
            module, _, name = node["_target_"].rpartition(".")
            source = getattr(importlib.import_module(module), name)
            keys = {name: value for name, value in node.items() if name != "_target_"}
            for message in source.problems(says(cfg, "algorithm", "data_form", "prompts"), **keys):
                yield _placed(message, key, keys)


def divergence_in_range(cfg: Config) -> Iterator[str]:
    """Where `beta` lies between two divergences, and is no weight of a KL term."""
    beta = number(cfg, "algorithm.beta")
    if get(cfg, "algorithm.lmbda") is not None and beta is not None and beta > 1:
        yield f"algorithm.beta: {beta} must be at most 1, which is reverse KL: type algorithm.beta=0.5"


def smoothing_fits(cfg: Config) -> Iterator[str]:
    """DFT's weight is the probability of one target; a spread one has none."""
    if get(cfg, "algorithm.loss") == "dft" and (number(cfg, "algorithm.label_smoothing") or 0) > 0:
        yield "algorithm.label_smoothing: only the nll loss has it: type algorithm.label_smoothing=0"


READ_RUNS = {"alignment.task.report.run": "report", "alignment.task.compare.run": "compare"}


def runs_read(cfg: Config) -> Iterator[str]:
    """`runs` is what reports and comparisons read, and nothing else does."""
    runs, task = get(cfg, "runs"), READ_RUNS.get(str(get(cfg, "task._target_")))
    if task and not runs:
        yield f"runs: task={task} reads runs and none are named: type runs=<folder of a run or of a sweep>"
    if runs and not task:
        yield f"runs: {runs} is read by a report only: type task=report runs={runs}, or leave runs out"


PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")


def precision_known(cfg: Config) -> Iterator[str]:
    value = get(cfg, "trainer.precision", "auto")
    if value not in PRECISIONS:
        yield f"trainer.precision: {value!r} is none of {', '.join(PRECISIONS)}: type trainer.precision=auto"


RULES: list[Callable[[Config], Iterator[str]]] = [
    text_none,
    numbers_in_range,
    counts_positive,
    devices_counted,
    checkpoints_kept,
    reference_provided,
    reference_known_in_advance,
    moving_reference_used,
    adapter_for_reference,
    adapter_for_strategy,
    adapter_for_critic,
    adapter_leaves_base_alone,
    policy_can_be_served,
    group_large_enough,
    rollout_divides,
    overlong_fits,
    resumed_run_goes_on,
    batch_divides,
    sorted_loss_whole,
    smoothing_fits,
    divergence_in_range,
    trainer_owned,
    runs_read,
    precision_known,
    rewards_given,
    data_has_form,
    data_readable,
]
