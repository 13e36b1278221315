"""How good a trained process reward model finds the steps of a completion."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from alignment.batch import Batch
from alignment.errors import UserError
from alignment.losses.prm import solution_score
from alignment.model.scorer import completion_token_logits, score_head
from alignment.reward.model import RewardModel, Tokens


class ProcessRewardModel(RewardModel):
    """A model with two classes at every token, bad and good, as `algorithm=prm` saves it: P(good) after each step.

    What is scored is the prompt under the model's own chat template and the completion's steps, each followed by
    `separator`, whose last token is asked. Empty steps are left out; a completion of none is one empty step.

    aggregate: how the steps make one score: min (Math-Shepherd, 2312.08935), prod ("Let's Verify Step by Step",
        2305.20050), last, mean. separator: what steps end with, as in training (encoding.step_separator).
    path, batch_size, dtype, device, weight: see RewardModel.
    """

    key: ClassVar[str] = "reward.prm"

    def __init__(
        self,
        *,
        path: str,
        aggregate: Literal["min", "prod", "last", "mean"] = "min",
        separator: str = "\n",
        **common: Any,
    ) -> None:
        super().__init__(path=path, **common)
        self.aggregate, self.separator = aggregate, separator
        if not separator or not self._continued(separator):
            raise UserError("reward.prm.separator: it has no token to ask: type reward.prm.separator='\"\\n\"'")

    def _adapter(self, folder: Path) -> str | None:
        if super()._adapter(folder):
            raise UserError(
                f"{self.key}.path: {folder} is an adapter: type {self.key}.path=<model/ of a run of algorithm=prm>"
            )
        return None

    def load(self) -> nn.Module:
        model = self.source.frozen_scorer(2, per_token=True)
        if score_head(model).out_features != 2:
            raise UserError(f"{self.key}.path: {self.name} has no two classes, bad and good")
        return model

    def score(self, batch: Batch) -> Tensor:
        """(N,), from 0 to 1."""
        good = completion_token_logits(self.model, batch).softmax(-1)[..., 1]
        return solution_score(good, batch.loss_mask, self.aggregate)

    def _tokens(self, row: dict[str, Any], text: str) -> Tokens:
        prompt, ids, mask = self._prompt(row), list[int](), list[bool]()
        steps = [step for step in text.split(self.separator) if step.strip()] or [""]
        for step in steps:
            said, end = self._continued(step) if step else [], self._continued(self.separator)
            ids += said + end
            mask += [False] * (len(said) + len(end) - 1) + [True]
        return Tokens(prompt, ids, mask)

    def _prompt(self, row: dict[str, Any]) -> list[int]:
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            return [*self._bos, *self._ids(prompt)]
        if not prompt:
            raise UserError("a row without a prompt: a reward model scores an answer to something")
        options = {"tools": row.get("tools") or None, **(row.get("chat_template_kwargs") or {})}
        return self._ids(self._show(prompt, add_generation_prompt=True, **options))
