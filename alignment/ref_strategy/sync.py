"""A reference that follows the policy (TR-DPO)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from alignment.losses.reference_update import blend_, is_due
from alignment.model.adapters import add_reference_adapter, use_adapter
from alignment.ref_strategy.base import Reference


class Sync(Reference):
    """Every `every` optimizer steps: reference <- alpha * policy + (1 - alpha) * reference.

    TR-DPO (2404.09656) eq. 1 (soft, alpha < 1) and eq. 2 (hard, alpha = 1). Full fine-tuning keeps a frozen copy.
    Under LoRA the copy is a second adapter on the same base, so no second model exists; A and B are blended each by
    itself, which for 0 < alpha < 1 is not the blend of the products BA (at alpha = 1 it is exact).
    """

    moves = True

    def __init__(self, *, alpha: float, every: int) -> None:
        super().__init__()
        self.alpha, self.every = alpha, every
        self.model: nn.Module | None = None

    def attach(self, source: Any, policy: nn.Module) -> None:
        if source.adapter == "lora":
            add_reference_adapter(policy)
        else:
            self.model = source.frozen()

    @contextmanager
    def scoring_model(self, policy: nn.Module) -> Iterator[nn.Module]:
        if self.model is not None:
            yield self.model
            return
        with use_adapter(policy, "reference"):
            yield policy

    @torch.no_grad()
    def after_step(self, policy: nn.Module, step: int) -> None:
        if is_due(step, self.every):
            references, policies = zip(*self._pairs(policy), strict=True)
            blend_(references, policies, alpha=self.alpha)

    def _pairs(self, policy: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """(reference, policy) parameters, paired by name."""
        named = dict(policy.named_parameters())
        if self.model is not None:
            for name, parameter in self.model.named_parameters():
                yield parameter, named[name]
            return
        for name, parameter in named.items():
            if ".reference." in name:
                yield parameter, named[name.replace(".reference.", ".default.")]

    def checkpointed(self, name: str) -> bool:
        return name.startswith("reference.model.") or ".reference." in name
