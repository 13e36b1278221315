"""One rollout is one Lightning epoch: sample, score, compute advantages, fill the buffer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning as L
import torch

from alignment.batch import Batch, Example, concat, pad, side_by_side
from alignment.losses.completion_stats import repetition
from alignment.losses.reduce import REDUCTIONS, step_count
from alignment.losses.sampling import informative_groups
from alignment.reward.combine import rows_of
from alignment.rollout.hf import Mixture

# Seeds of training rollouts, of evaluations and of the reference's samples are drawn from disjoint ranges, all of them
# below 2^32: torch's generator reads no higher bits.
EVALUATION_SEED = 1 << 30
REFERENCE_SEED = 1 << 31
log = logging.getLogger("alignment")


class RolloutCallback(L.Callback):
    """Samples completions and scores them: a whole rollout before an on-policy epoch, held-out prompts in evaluation.

    What is sampled is a pure function of (weights, seed, number of draws so far, rank), so a run resumed at a rollout
    boundary repeats exactly what the uninterrupted one would have done, and an evaluation leaves training untouched.
    """

    def __init__(self, engine, rewards, *, seed: int, num_eval_samples: int = 1, eval_temperature: float = 1.0) -> None:
        self.engine, self.rewards, self.seed = engine, rewards, seed
        self.num_eval_samples, self.eval_temperature = num_eval_samples, eval_temperature
        self._synced_step: tuple[int, int] | None = None
        self.num_draws = 0  # times that prompts were taken; in checkpoints
        self._told_of_missing = self._told_of_unscorable = self._told_of_policy = False

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if not module.online:
            return
        rollout = self.collect(trainer, module)
        microbatches = module.prepare_rollout(rollout)
        count_step_tokens(trainer, microbatches)
        trainer.datamodule.rollouts.fill(microbatches, rollout)

    def collect(self, trainer: Any, module: Any) -> Batch:
        """This rank's part of a rollout. Where the module allows more draws than one (dynamic sampling, DAPO,
        2503.14476 section 3.2), groups whose rewards are all equal give way to groups of further prompts; those still
        missing after the last draw are filled up with them."""
        drawn, found, wanted = [], 0, 0
        for _ in range(module.max_draws):
            drawn.append(self.draw(trainer, module))
            if module.max_draws == 1:
                return drawn[0]
            wanted = wanted or len(drawn[0].examples)
            found += int(informative_groups(drawn[-1].rewards, module.group_size).sum())
            missing = torch.tensor(float(max(0, wanted - found)), device=trainer.strategy.root_device)
            if not trainer.strategy.reduce(missing, reduce_op="sum"):
                break
        module.meter.add("rollout/draws", len(drawn), 1)
        module.meter.add("rollout/informative", found, wanted * len(drawn))
        if found < wanted and not self._told_of_missing:
            self._told_of_missing = True
            log.warning(
                "only %d of %d groups differ in reward after %d draws: raise algorithm.max_draws, or use prompts that "
                "are neither too easy nor too hard",
                found,
                wanted,
                len(drawn),
            )
        return first_informative(drawn, wanted)

    def draw(self, trainer: Any, module: Any) -> Batch:
        """Completions of the next prompts, scored. Which they are follows from the number of draws so far alone."""
        number, self.num_draws = self.num_draws, self.num_draws + 1
        examples = trainer.datamodule.prompts_for(number)
        if module.reference_sample:
            return self._beside_reference(trainer, module, examples, number)
        rollout = self.sample(trainer, module, examples, module.group_size, seed=number)
        log_rollout(module.meter, "rollout", rollout)
        if module.greedy_baseline:
            greedy = self.sample(trainer, module, examples, 1, seed=number, temperature=0.0).rewards
            assert greedy is not None
            rollout.greedy_rewards = greedy.repeat_interleave(module.group_size)
            module.meter.mean("rollout/greedy_reward", greedy)
        return rollout

    @torch.no_grad()
    def _beside_reference(self, trainer: Any, module: Any, examples: Sequence[Example], number: int) -> Batch:
        """After each prompt's completions of the policy one of the reference, or of its mixture with the policy; scored
        together, for rewards that compare."""
        coef, size = module.mixture_coef, module.group_size
        own = self.complete(trainer, module, examples, size - 1, seed=number)
        other = self.complete(trainer, module, examples, 1, seed=REFERENCE_SEED + number, mixture_coef=coef)
        for batch, is_reference in ((own, False), (other, True)):
            batch.from_reference = torch.full((len(batch),), is_reference)
        both = side_by_side([own, other])
        started = time.perf_counter()
        self.score(module, both)
        module.meter.total("time/reward", time.perf_counter() - started)
        rows = torch.arange(len(both)).view(-1, size)
        log_rollout(module.meter, "rollout", both.select(rows[:, :-1]))
        assert both.rewards is not None
        name = "reference" if coef == 1 else "mixture"
        module.meter.mean(f"rollout/{name}_reward", both.rewards[rows[:, -1]])
        return both

    def state_dict(self) -> dict[str, Any]:
        return {"num_draws": self.num_draws}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_draws = state_dict["num_draws"]

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch.group_size:
            return  # held-out examples with completions of their own: only their loss is measured
        sampled = self.sample(
            trainer,
            module,
            batch.examples,
            self.num_eval_samples,
            seed=EVALUATION_SEED + batch_idx,
            temperature=self.eval_temperature,
        ).to(module.device)
        vars(batch).update(vars(sampled))

    @torch.no_grad()
    def sample(
        self,
        trainer: Any,
        module: Any,
        examples: Sequence[Example],
        group_size: int,
        *,
        seed: int,
        temperature: float | None = None,
    ) -> Batch:
        """`group_size` completions of each prompt, scored. Adds the seconds it took to the module's meter."""
        batch = self.complete(trainer, module, examples, group_size, seed=seed, temperature=temperature)
        generated = time.perf_counter()
        self.score(module, batch)
        module.meter.total("time/reward", time.perf_counter() - generated)
        return batch

    @torch.no_grad()
    def complete(
        self,
        trainer: Any,
        module: Any,
        examples: Sequence[Example],
        group_size: int,
        *,
        seed: int,
        temperature: float | None = None,
        mixture_coef: float = 0.0,
    ) -> Batch:
        """The same without scores; of the policy (0), of the reference (1), or of their mixture (between)."""
        started = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(trainer.precision_plugin.forward_context())
            self._sync(trainer, module)
            model, settings = module.policy, dict[str, Any](temperature=temperature)
            reference = partial(module.reference.scoring_model, module.policy)
            if mixture_coef == 1:
                model = stack.enter_context(reference())
            elif mixture_coef > 0:
                settings["mixture"] = Mixture(reference, mixture_coef)
            completions = self.engine.generate(
                model,
                [example.prompt_ids for example in examples],
                group_size=group_size,
                stop_ids=module.source.stop_ids,
                pad_id=module.source.tokenizer.pad_token_id,
                seed=rank_seed(self.seed, seed, trainer.global_rank),
                **settings,
            )
        module.meter.total("time/generate", time.perf_counter() - started)
        return to_batch(examples, completions, group_size)

    def _sync(self, trainer: Any, module: Any) -> None:
        """Refresh the engine's weights, once per change of the policy's."""
        version = (id(module.policy), trainer.global_step)
        if self._synced_step != version:
            self.engine.sync(module.policy)
            self._synced_step = version

    def score(self, module: Any, batch: Batch) -> None:
        """Decode and reward. NaN marks a completion that no reward could score."""
        if not self._told_of_policy:
            self._told_of_policy = True
            self.rewards.share(module.policy, module.source, module.trainer.precision_plugin.forward_context)
        tokenizer = module.source.tokenizer
        ids = [row[mask].tolist() for row, mask in zip(batch.completion_ids, batch.completion_mask, strict=True)]
        batch.texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        before = self.rewards.counters
        scores = self.rewards(batch.texts, rows_of(batch), group_size=batch.group_size)
        for name, count in self.rewards.counters.items():
            module.meter.total(f"reward/{name}", count - before.get(name, 0))
        if scores.total and all(value is None for value in scores.total) and not self._told_of_unscorable:
            self._told_of_unscorable = True
            log.warning("no completion could be scored: the rows lack what the reward reads (reward.accuracy.column)")
        batch.rewards = as_tensor(scores.total)
        batch.parts = {name: as_tensor(values) for name, values in scores.parts.items()}


def first_informative(drawn: list[Batch], wanted: int) -> Batch:
    """The first `wanted` groups whose rewards differ, as they were drawn; where those are too few, others as well."""
    groups = []
    for number, batch in enumerate(drawn):
        assert batch.rewards is not None
        differ = informative_groups(batch.rewards, batch.group_size).tolist()
        groups += [(not useful, number, prompt) for prompt, useful in enumerate(differ)]
    chosen = sorted(groups)[:wanted]
    prompts = [[prompt for _, number, prompt in chosen if number == n] for n in range(len(drawn))]
    return concat([batch.pick(taken) for batch, taken in zip(drawn, prompts, strict=True) if taken])


def rank_seed(seed: int, number: int, rank: int) -> int:
    """One sampling seed per (run, rollout, rank); 63 bits, so that neighbours do not collide."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % (1 << 63))
    return int(torch.randint(1 << 62, (rank + 1,), generator=generator)[rank])


def as_tensor(values: Sequence[float | None]) -> torch.Tensor:
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float32)


def to_batch(examples: Sequence[Example], completions, group_size: int) -> Batch:
    """Sampled token ids as a padded Batch. Masks come from the lengths, so EOS may equal the pad id."""
    prompt_ids, prompt_mask = pad([example.prompt_ids for example in examples], left=True)
    completion_ids, completion_mask = pad(completions.ids)
    batch = Batch(prompt_ids, prompt_mask, completion_ids, completion_mask, None, group_size, examples)
    batch.finished = torch.tensor(completions.finished, dtype=torch.bool)
    sampler = torch.zeros(completion_ids.shape, dtype=torch.float32)
    sampler[completion_mask] = torch.tensor([x for row in completions.logprobs for x in row], dtype=torch.float32)
    batch.sampler_logprobs = sampler
    return batch


def count_step_tokens(trainer: Any, microbatches: list[Batch]) -> None:
    """What a mean of each accumulation window divides by, over all ranks: one all-reduce per rollout."""
    window = trainer.accumulate_grad_batches
    steps = [microbatches[i : i + window] for i in range(0, len(microbatches), window)]
    mine = [[sum(float(step_count(batch.loss_mask, name)) for batch in step) for name in REDUCTIONS] for step in steps]
    counts = trainer.strategy.reduce(torch.tensor(mine, device=trainer.strategy.root_device), reduce_op="sum")
    for step, row in zip(steps, counts.tolist(), strict=True):
        for batch in step:
            batch.step_counts = dict(zip(REDUCTIONS, row, strict=True))
            batch.step_tokens = batch.step_counts["token_mean"]
            batch.step_examples = batch.step_counts["row_mean_token_sum"]


def log_rollout(meter, phase: str, batch: Batch) -> None:
    """Reward, its spread and parts, length, share that ended by itself, repetition, entropy: all as sums and counts.

    The entropy is that of what was sampled: the mean of -log p of the sampled tokens, which costs nothing.
    """
    assert batch.rewards is not None
    assert batch.finished is not None
    meter.mean(f"{phase}/reward", batch.rewards)
    for name, values in batch.parts.items():
        meter.mean(f"{phase}/{name}", values)
    lengths = batch.completion_mask.sum(-1).float()
    meter.mean(f"{phase}/length", lengths)
    meter.mean(f"{phase}/finished", batch.finished.float())
    meter.mean(f"{phase}/repetition", repetition(batch.completion_ids, batch.completion_mask))
    if batch.sampler_logprobs is not None:
        meter.mean(f"{phase}/entropy", -batch.sampler_logprobs, batch.completion_mask)
    groups = batch.rewards.view(-1, batch.group_size)
    if batch.group_size > 1:
        spread = torch.where(groups.isnan(), groups.nanmean(1, keepdim=True), groups).std(1)
        meter.mean(f"{phase}/reward_std", spread)
        meter.mean(f"{phase}/zero_std_groups", (spread == 0).float())
