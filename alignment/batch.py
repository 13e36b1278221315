"""The one data structure of the program: prompts, each with G completions.

DPO has G=2 (chosen, rejected), SFT and KTO G=1, a ranked list G=K, GRPO and RLOO G=group size. Every algorithm, the
reference, the rewards and the rollout engine read and write this object.

`Batch` is deliberately an ordinary class: Lightning walks dicts, dataclasses and named tuples, casts their float fields
to the compute dtype and copies them before any hook. An opaque object keeps its float32 advantages, and its identity,
so that a field filled once (`ref_logprobs`) stays filled for later passes over the same rollout.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Example:
    """One tokenised prompt and its completions, before padding.

    prompt_ids: the prompt's token ids, everything the model sees before the first completion token.
    completions: G lists of token ids, each ending in its EOS unless it was truncated. Empty for a bare prompt.
    loss_masks: G lists, True where a token counts in the loss; None means every token counts.
    columns: the dataset row it came from (prompt, answer, any extra column): what rewards and samples see.
    id: stable key of the row's content, used by the reference cache and in messages.
    """

    prompt_ids: list[int]
    completions: list[list[int]] = field(default_factory=list)
    loss_masks: list[list[bool]] | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    id: str = ""

    @property
    def loss_tokens(self) -> list[int]:
        """Tokens of each completion that count in the loss."""
        if self.loss_masks is None:
            return [len(ids) for ids in self.completions]
        return [sum(mask) for mask in self.loss_masks]


class Batch:
    """B prompts, each with G completions: N = B * G rows, row n belongs to prompt n // G.

    | field | shape | meaning |
    |---|---|---|
    | prompt_ids, prompt_mask | (B, P) int64, bool | left-padded prompts; masks come from lengths, not from the pad id |
    | completion_ids, completion_mask | (N, C) int64, bool | right-padded; True up to and including EOS |
    | loss_mask | (N, C) bool | the tokens that count (assistant turns; not tool output, not filtered rows) |
    | group_size | int | G; 0 for bare prompts |
    | finished | (N,) bool | the completion ended by itself, that is with EOS |
    | rewards | (N,) float32 | weighted total; NaN = unscorable |
    | advantages | (N,) or (N, C) float32 | online only |
    | greedy_rewards | (N,) float32 or None | reward of the prompt's greedy completion, for those that compare with it |
    | from_reference | (N,) bool or None | sampled from the reference or its mixture, for those that learn from both |
    | policy_mask | (N, C) bool or None | loss tokens whose policy term trains; None = all |
    | values, returns | (N, C) float32 or None | a critic's, before each token, when it was sampled; what it learns |
    | old_logprobs, ref_logprobs, sampler_logprobs | (N, C) float32 or None | by callbacks; 0 outside the mask |
    | step_tokens, step_examples | float | loss tokens and prompts of the whole optimizer step, over all ranks |
    | step_chosen_tokens | float | offline: loss tokens of each prompt's first completion, over the same |
    | step_counts | dict of float | online: what each reduction of a policy loss divides by, over the same |
    | examples | list of B `Example` | rows the prompts came from |
    | texts | list of N str | decoded completions, online and in evaluation |
    """

    def __init__(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        loss_mask: Tensor | None = None,
        group_size: int = 1,
        examples: Sequence[Example] = (),
    ) -> None:
        self.prompt_ids, self.prompt_mask = prompt_ids, prompt_mask
        self.completion_ids, self.completion_mask = completion_ids, completion_mask
        self.loss_mask = completion_mask.clone() if loss_mask is None else loss_mask
        self.group_size = group_size
        self.examples = list(examples)
        self.texts: list[str] = []
        self.parts: dict[str, Tensor] = {}
        self.finished: Tensor | None = None
        self.rewards: Tensor | None = None
        self.advantages: Tensor | None = None
        self.greedy_rewards: Tensor | None = None
        self.from_reference: Tensor | None = None
        self.policy_mask: Tensor | None = None
        self.values: Tensor | None = None
        self.returns: Tensor | None = None
        self.old_logprobs: Tensor | None = None
        self.ref_logprobs: Tensor | None = None
        self.sampler_logprobs: Tensor | None = None
        self.step_tokens: float = float(self.loss_mask.sum())
        self.step_examples: float = float(len(prompt_ids))
        self.step_chosen_tokens: float = float(self.loss_mask[:: max(group_size, 1)].sum())
        self.step_counts: dict[str, float] = {}

    def __len__(self) -> int:
        """Number of completions N (of prompts, where there are no completions yet)."""
        return len(self.completion_ids) if self.group_size else len(self.prompt_ids)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device, non_blocking=non_blocking))
        self.parts = {name: value.to(device, non_blocking=non_blocking) for name, value in self.parts.items()}
        return self

    def split(self, size: int) -> list[Batch]:
        """Microbatches of `size` completions, in order, each keeping its prompts shared.

        A microbatch holds whole groups (size a multiple of G) or an equal part of one group (size a divisor of G).
        Raises ValueError where neither holds.
        """
        group, rows = self.group_size, len(self.completion_ids)
        if rows % size or (size % group and group % size):
            raise ValueError(
                f"{rows} completions in groups of {group} cannot be split into microbatches of {size}: "
                f"use a multiple or a divisor of {group} that divides {rows}"
            )
        return [self._rows(start, start + size) for start in range(0, rows, size)]

    def select(self, rows: Tensor) -> Batch:
        """Some completions of each prompt: `rows` (B, k) are row numbers, those of prompt b in line b; G becomes k."""
        flat, part = rows.flatten(), copy.copy(self)
        part.group_size = rows.shape[1]
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name not in ("prompt_ids", "prompt_mask"):
                setattr(part, name, value[flat])
        part.texts = [self.texts[n] for n in flat.tolist()] if self.texts else []
        part.parts = {name: value[flat] for name, value in self.parts.items()}
        return part

    def pick(self, prompts: Sequence[int]) -> Batch:
        """Some prompts, each with all its completions."""
        numbers = torch.tensor(list(prompts), dtype=torch.long, device=self.prompt_ids.device)
        rows = numbers[:, None] * self.group_size + torch.arange(self.group_size, device=numbers.device)
        part = self.select(rows)
        part.prompt_ids, part.prompt_mask = self.prompt_ids[numbers], self.prompt_mask[numbers]
        part.examples = [self.examples[n] for n in prompts]
        return part

    def _rows(self, start: int, stop: int) -> Batch:
        prompts = slice(start // self.group_size, -(-stop // self.group_size))
        part = copy.copy(self)
        part.group_size = min(self.group_size, stop - start)
        by_prompt = {"prompt_ids", "prompt_mask", "examples"}
        for name, value in vars(self).items():
            if name in by_prompt:
                setattr(part, name, value[prompts])
            elif isinstance(value, Tensor) or name == "texts":
                setattr(part, name, value[start:stop])
        part.parts = {name: value[start:stop] for name, value in self.parts.items()}
        return part


def concat(batches: Sequence[Batch]) -> Batch:
    """Batches of one group size as one, padded to the widest."""
    whole = copy.copy(batches[0])
    for name, value in vars(batches[0]).items():
        values = [getattr(batch, name) for batch in batches]
        if isinstance(value, Tensor):
            setattr(whole, name, torch.cat(_of_one_width(values, left=name.startswith("prompt_"))))
        elif isinstance(value, list):
            setattr(whole, name, [item for items in values for item in items])
    whole.parts = {name: torch.cat([batch.parts[name] for batch in batches]) for name in batches[0].parts}
    return whole


def side_by_side(batches: Sequence[Batch]) -> Batch:
    """Completions of the same prompts as one batch: for each prompt those of the first batch, then of the next."""
    whole, num_prompts = concat(batches), len(batches[0].prompt_ids)
    starts = [sum(map(len, batches[:number])) for number in range(len(batches))]
    rows = [torch.arange(len(batch)).view(num_prompts, -1) for batch in batches]
    whole = whole.select(torch.cat([start + row for start, row in zip(starts, rows, strict=True)], 1))
    whole.prompt_ids, whole.prompt_mask = batches[0].prompt_ids, batches[0].prompt_mask
    whole.examples = batches[0].examples
    return whole


def _of_one_width(tensors: Sequence[Tensor], *, left: bool) -> list[Tensor]:
    if tensors[0].dim() == 1:
        return list(tensors)
    width = max(tensor.shape[1] for tensor in tensors)
    gaps = [width - tensor.shape[1] for tensor in tensors]
    return [
        torch.nn.functional.pad(tensor, (gap, 0) if left else (0, gap))
        for tensor, gap in zip(tensors, gaps, strict=True)
    ]


def pad(sequences: Sequence[Sequence[int]], *, left: bool = False, value: int = 0) -> tuple[Tensor, Tensor]:
    """Pad to the longest: ids (R, L) int64 and mask (R, L) bool. L is at least 1, so that no tensor is empty."""
    width = max([len(s) for s in sequences], default=0) or 1
    ids = torch.full((len(sequences), width), value, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        where = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[row, where] = torch.as_tensor(sequence, dtype=torch.long)
        mask[row, where] = True
    return ids, mask


def collate(examples: Sequence[Example]) -> Batch:
    """Pad examples into one Batch. Every example must have the same number of completions (0 for bare prompts)."""
    groups = {len(example.completions) for example in examples}
    if len(groups) != 1:
        raise ValueError(f"examples of one batch must have equally many completions, got {sorted(groups)}")
    prompt_ids, prompt_mask = pad([example.prompt_ids for example in examples], left=True)
    completion_ids, completion_mask = pad([ids for example in examples for ids in example.completions])
    loss_mask = completion_mask.clone()
    if any(example.loss_masks is not None for example in examples):
        rows = [
            mask
            for example in examples
            for mask in (example.loss_masks or [[True] * len(ids) for ids in example.completions])
        ]
        loss_mask &= pad(rows)[0].bool()
    return Batch(prompt_ids, prompt_mask, completion_ids, completion_mask, loss_mask, groups.pop(), examples)
