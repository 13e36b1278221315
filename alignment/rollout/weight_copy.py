"""A second model to sample with: the policy's weights, adapter merged in, in the number format that is fast."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alignment.errors import UserError
from alignment.model.adapters import merged_weights
from alignment.model.logprobs import causal_lm


class WeightCopy:
    """A plain model of the policy's own class, made from its config and refreshed in place.

    Nothing is read from disk, no random number is used, and the policy is only read: adapters are merged in the copy.
    It is no submodule of anything, so optimizers, checkpoints and wrappers do not see it.
    Raises UserError where the policy's weights are not those of a plain model: a quantised base, an adapter that cannot
    be merged.
    """

    def __init__(self, policy: nn.Module, dtype: torch.dtype) -> None:
        base = causal_lm(policy)
        self.model = _empty_like(base, dtype)
        _copy_buffers(base, self.model)
        tied = {name for group in _tied_names(self.model) for name in group}
        done = self._fill(policy, changed_only=False, keep=tied)
        if missing := self.model.state_dict().keys() - done.keys():
            raise UserError(f"{type(base).__name__} gives no weight {min(missing)}")
        self._untie({name: tensor for name, tensor in done.items() if tensor is not None})

    def refresh(self, policy: nn.Module) -> None:
        """Take over whatever training, or another adapter, may have changed."""
        self._fill(policy, changed_only=True)

    @torch.no_grad()
    def _fill(self, policy: nn.Module, *, changed_only: bool, keep: Collection[str] = ()) -> dict[str, Tensor | None]:
        """Copy the merged weights one by one; returns their names, with the tensor itself for those in `keep`."""
        done: dict[str, Tensor | None] = {}
        targets = self.model.state_dict(keep_vars=True)
        with torch.autocast(self.model.device.type, enabled=False):  # it would multiply adapters in the short format
            for name, tensor in merged_weights(policy, changed_only=changed_only):
                whole, target = _whole(tensor), targets.get(name)
                if target is None or target.shape != whole.shape:
                    raise UserError(
                        f"weight {name} {list(whole.shape)} is not one of a plain {type(self.model).__name__}"
                    )
                target.copy_(whole)
                done[name] = whole if name in keep else None
        return done

    def _untie(self, sources: dict[str, Tensor]) -> None:
        """Give weights that share memory here but not in the policy (an adapter on one of them) each their own."""
        for group in _tied_names(self.model):
            if len({sources[name].data_ptr() for name in group}) == 1:
                continue
            for name in group:
                path, _, leaf = name.rpartition(".")
                module = self.model.get_submodule(path)
                own = sources[name].to(getattr(module, leaf).dtype, copy=True)
                module.register_parameter(leaf, nn.Parameter(own, requires_grad=False))


def _empty_like(base: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The base's class and config, weights allocated on its device but not set."""
    config = copy.deepcopy(base.config)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):  # nothing is initialised there, so no random number is drawn
        model = type(base)._from_config(config, dtype=dtype, attn_implementation=base.config._attn_implementation)
    model.to_empty(device=next(base.parameters()).device)
    model.tie_weights()  # to_empty gives tied weights a tensor each
    return model.requires_grad_(False).eval()


def _copy_buffers(base: PreTrainedModel, model: PreTrainedModel) -> None:
    """Buffers that no state dict holds (rotary frequencies) are the base's, in its number format."""
    there: dict[str, Any] = {name.replace(".base_layer", ""): buffer for name, buffer in base.named_buffers()}
    for name, buffer in list(model.named_buffers()):
        if name not in there:
            raise UserError(f"{type(base).__name__} has no buffer {name}")
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, there[name].detach().clone().to(buffer.device))


def _tied_names(model: nn.Module) -> list[list[str]]:
    groups = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    return [names for names in groups.values() if len(names) > 1]


def _whole(tensor: Tensor) -> Tensor:
    """A tensor that is sharded over devices, gathered; every rank asks for the same ones in the same order."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()
