"""The reference is the policy itself with its adapter switched off: no second copy of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from alignment.model.adapters import adapter_off, add_reference_adapter, check_adapter_off_is_base, use_adapter
from alignment.ref_strategy.base import Reference


class LoRA(Reference):
    """Adapter off; where training goes on from an existing adapter, a second frozen copy of that adapter.

    A policy that starts from an SFT adapter has that adapter as its reference, not the bare base: otherwise the first
    DPO loss is not ln 2 and the KL of the first step is not 0.
    """

    needs_adapter = True

    def __init__(self) -> None:
        super().__init__()
        self.second_adapter = False

    def attach(self, source: Any, policy: nn.Module) -> None:
        if source.adapter_path is not None:
            add_reference_adapter(policy)
            self.second_adapter = True
        else:
            check_adapter_off_is_base(policy)

    @contextmanager
    def scoring_model(self, policy: nn.Module) -> Iterator[nn.Module]:
        with use_adapter(policy, "reference") if self.second_adapter else adapter_off(policy):
            yield policy
