"""`task=evaluate`: what a trained model can do, and what it has lost, with intervals over prompts."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import json
import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from alignment.batch import Batch, Example, collate
from alignment.config import build
from alignment.data.jsonl import Jsonl
from alignment.data.prepare import prepare
from alignment.errors import UserError
from alignment.experiment.record import plain, write_summary
from alignment.experiment.statistics import NUM_RESAMPLES, Estimate, mean_interval
from alignment.losses.selection import pass_at_k
from alignment.model.hf import HFModel
from alignment.reward.combine import RewardSet, Scores, rows_of
from alignment.task.inference import Inference, build_rewards, inference_problems, prompts

log = logging.getLogger("alignment")
# Values of each metric, one per prompt (or document): what an interval is made of.
Values = dict[str, list[float]]


def run(
    cfg: dict[str, Any],
    *,
    split: Literal["train", "heldout"],
    num_prompts: int | None,
    num_samples: int,
    batch_size: int,
    against: str | None,
    text: str | None,
    harness: list[str],
) -> dict[str, Any]:
    """Sample, score, compare; writes evaluated.jsonl and summary.json, returns the means and `<name>/low`, `/high`.

    Rewards: mean, and pass@k for k = 1, 2, 4, ... (2107.03374 eq. 1, a completion passes with a score of 1). With
    `against`: win rate over the other model's completions of the same prompts by the total reward (ties count half),
    and the KL of the model from it, in nats per completion, over its own samples. With `text`: perplexity over the
    tokens of a file's rows. `harness`: tasks of lm-eval-harness. Intervals are over prompts, 95 %.
    """
    other = _other(cfg, against)
    folder, values, found = Path(cfg["output_dir"]), defaultdict(list), {}
    with contextlib.closing(build_rewards(cfg)) as rewards:
        model = Inference(cfg)
        examples = prompts(cfg, model.source, split, num_prompts)
        texts = documents(cfg, model.source, text) if text else []
        chunks = [examples[start : start + batch_size] for start in range(0, len(examples), batch_size)]
        mine = sampled(model, chunks, num_samples, rewards, values)
        found |= perplexity(model, texts, "perplexity") | run_harness(model, harness, batch_size)
        temperature = model.engine.temperature or 1.0  # what is drawn greedily is compared by the plain distributions
        logprobs = [model.logprobs(batch, temperature=temperature) for batch, _ in mine] if other else []
        del model
        gc.collect()
        theirs: list[Judged] = []
        if other is not None:
            model = Inference(cfg, other)
            theirs = sampled(model, chunks, num_samples, rewards, defaultdict(list), "against")
            compare(model, mine, theirs, logprobs, values)
            found |= perplexity(model, texts, "against/perplexity")
    write_lines(folder, mine, theirs)
    for name, numbers in values.items():
        found |= estimated(name, mean_interval(numbers))
    found |= {f"reward/{name}": count for name, count in rewards.counters.items() if count}
    found |= {"prompts": len(examples), "completions": len(examples) * num_samples}
    write_summary(folder, found)
    log.info("evaluated.jsonl and summary.json are in %s", folder)
    return found | {"output_dir": str(folder)}


def problems(cfg: dict[str, Any]) -> list[str]:
    """What can be said before the model loads."""
    found = inference_problems(cfg)
    try:
        _other(cfg, cfg["task"]["against"])
    except UserError as error:
        found.append(str(error))
    if cfg["task"]["harness"] and importlib.util.find_spec("lm_eval") is None:
        found.append(
            "task.harness: lm-eval-harness is not installed: type pip install 'lm_eval[hf]', or task.harness=[]"
        )
    return found


def estimated(name: str, estimate: Estimate) -> dict[str, float]:
    """A value and its interval under the names of summary.json; the same for the eye."""
    log.info("%-28s %10.4f  [%.4f, %.4f]", name, *estimate[:3])
    return {name: estimate.value, f"{name}/low": estimate.low, f"{name}/high": estimate.high}


Judged = tuple[Batch, Scores]


def _other(cfg: dict[str, Any], against: str | None) -> Any:
    """The model to compare with: the base, an adapter on it, or a model of its own. None where nothing is asked."""
    if against is None:
        return None
    base = cfg["model"] | {"adapter_path": None}
    if against == "base":
        if cfg["model"]["adapter_path"] is None:
            raise UserError(
                "task.against: base is the model without its adapter, and there is none: type task.against=<folder>"
            )
        return build(base)
    if (Path(against) / "adapter_config.json").is_file():
        return build(base | {"adapter": "lora", "adapter_path": against})
    if not Path(against).is_dir() and against.startswith((".", "/", "~")):
        raise UserError(f"task.against: there is no folder {against}: type task.against=base, or a folder or hub name")
    settings: dict[str, Any] = {
        field.name: base[field.name] for field in dataclasses.fields(HFModel) if field.name in base
    }
    settings |= {"path": against, "adapter": "none"}
    return HFModel(**settings)


# ---- samples -------------------------------------------------------------------------------------------------------
def sampled(
    model: Inference,
    chunks: Sequence[Sequence[Example]],
    num_samples: int,
    rewards: RewardSet,
    values: Values,
    what: str = "evaluate",
) -> list[Judged]:
    """Completions of every chunk of prompts with their scores; adds each prompt's means to `values`."""
    found: list[Judged] = []
    total = sum(map(len, chunks)) * num_samples
    with tqdm(total=total, desc=what, unit=" completions") as bar:
        for number, chunk in enumerate(chunks):
            batch = model.complete(chunk, num_samples, number=number)
            scores = rewards(batch.texts, rows_of(batch), group_size=batch.group_size)
            measure(batch, scores, values)
            found.append((batch, scores))
            bar.update(len(batch))
    return found


def measure(batch: Batch, scores: Scores, values: Values) -> None:
    """One number per prompt: mean scores, pass@k, length, the share that ended by itself."""
    size = batch.group_size
    assert batch.finished is not None
    lengths, finished = batch.completion_mask.sum(-1).tolist(), batch.finished.float().tolist()
    for start in range(0, len(batch), size):
        part = slice(start, start + size)
        values["length"].append(statistics.fmean(lengths[part]))
        values["finished"].append(statistics.fmean(finished[part]))
        for name, every in (("reward", scores.total), *scores.parts.items()):
            scored = [score for score in every[part] if score is not None]
            if not scored:
                continue
            values[name].append(statistics.fmean(scored))
            if name != "reward" and len(scored) == size:
                right = sum(score == 1 for score in scored)
                for k in (2**i for i in range(size.bit_length())):
                    values[f"{name}_pass@{k}"].append(pass_at_k(size, right, k))


def compare(
    model: Inference, mine: list[Judged], theirs: list[Judged], logprobs: list[torch.Tensor], values: Values
) -> None:
    """Win rate over the other model and KL from it, a number per prompt. `logprobs`: the model's own of its samples."""
    for (batch, scores), (_, others), own in zip(mine, theirs, logprobs, strict=True):
        size = batch.group_size
        gaps = (own - model.logprobs(batch, temperature=model.engine.temperature or 1.0)).sum(-1).tolist()
        for start in range(0, len(batch), size):
            part = slice(start, start + size)
            values["against/kl"].append(statistics.fmean(gaps[part]))
            pairs = [
                (a, b)
                for a, b in zip(scores.total[part], others.total[part], strict=True)
                if a is not None and b is not None
            ]
            if pairs:
                values["against/win_rate"].append(statistics.fmean((a > b) + 0.5 * (a == b) for a, b in pairs))
                values["against/reward"].append(statistics.fmean(b for _, b in pairs))


def write_lines(folder: Path, mine: list[Judged], theirs: list[Judged]) -> None:
    """A row per prompt: what was said and scored, and what the other model said."""
    with open(folder / "evaluated.jsonl", "w", encoding="utf-8") as file:
        for number, (batch, scores) in enumerate(mine):
            for i, example in enumerate(batch.examples):
                part = slice(i * batch.group_size, (i + 1) * batch.group_size)
                line = example.columns | {"completions": batch.texts[part], "scores": scores.total[part]}
                line["rewards"] = {name: every[part] for name, every in scores.parts.items()}
                if theirs:
                    other, judged = theirs[number]
                    line |= {"against": other.texts[part], "against_scores": judged.total[part]}
                file.write(json.dumps(plain(line, "evaluated"), ensure_ascii=False) + "\n")


# ---- text ----------------------------------------------------------------------------------------------------------
def documents(cfg: dict[str, Any], source: Any, path: str) -> Sequence[Example]:
    """The rows of a file as text whose every token, or every token of a completion, is predicted."""
    rows = Jsonl(path=path, heldout=None)
    keys = {"encoding": cfg["encoding"], "cleaning": cfg["cleaning"] | {"duplicates": "keep"}}
    try:
        return prepare(rows, "demonstrations", source, num_prompts=0, with_heldout=False, **keys).train
    except UserError as error:  # under the key that the user has typed
        raise UserError(str(error).replace("data.path", "task.text")) from error


def perplexity(model: Inference, texts: Sequence[Example], name: str) -> dict[str, float]:
    """exp of the mean -log p over all tokens; the interval resamples documents: tokens of one are not independent."""
    if not texts:
        return {}
    table = np.empty((len(texts), 2))
    for i, example in enumerate(tqdm(texts, desc=name, unit=" documents")):
        batch = collate([example])
        logprobs = model.logprobs(batch).double() * batch.loss_mask.cpu()
        table[i] = -float(logprobs.sum()), float(batch.loss_mask.sum())
    draws = np.random.default_rng(0).integers(len(table), size=(NUM_RESAMPLES, len(table)))
    sums = table[draws].sum(1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975]) if len(table) > 1 else (math.nan, math.nan)
    mean = table[:, 0].sum() / table[:, 1].sum()
    return estimated(name, Estimate(math.exp(mean), math.exp(low), math.exp(high), len(table)))


def run_harness(model: Inference, tasks: list[str], batch_size: int) -> dict[str, float]:
    """Results of lm-eval-harness by `harness/<task>/<metric>`, for the weights as they are here."""
    if not tasks:
        return {}
    harness, models = (importlib.import_module(name) for name in ("lm_eval", "lm_eval.models.huggingface"))
    with model.context():
        wrapped = models.HFLM(pretrained=model.model, tokenizer=model.source.tokenizer, batch_size=batch_size)
        results = harness.simple_evaluate(model=wrapped, tasks=list(tasks))
    return {
        f"harness/{task}/{metric.removesuffix(',none')}": float(value)
        for task, metrics in results["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
