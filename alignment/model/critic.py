"""A critic: how much reward is still to come, judged before each token of a completion.

Four kinds, from the least memory to the most freedom:

- detached_head: a linear head on the policy's own last hidden states, which it only reads;
- head: the same, but its loss also trains the policy's states, weighed against the policy loss by vf_coef;
- adapter: a second LoRA adapter on the policy's base, with a head. Policy, critic, and a reference that is the policy
  without its adapter, share one copy of the base; neither adapter feels the other's loss;
- model: a model of its own, trained like the policy (all weights, or an adapter).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from alignment.batch import Batch
from alignment.errors import UserError
from alignment.model.adapters import (
    CRITIC,
    POLICY,
    adapter_parameters,
    copy_adapter,
    is_of_adapter,
    recompute_with_same_adapter,
    trainable_state,
    use_adapter,
)
from alignment.model.logprobs import TokenScores, causal_lm, completion_states

Kind = Literal["adapter", "model", "head", "detached_head"]


class Critic(nn.Module):
    """Token values of one of the four kinds. It starts as the policy does, with a head of zeros: every value is 0.

    So the first value of a completion is no noise, and an adapter or a model starts from what the policy knows, an
    adapter at `adapter_path` included. Adapter and model begin with the same weights: they learn the same.
    """

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.model: nn.Module | None = None
        self.head: nn.Linear | None = None

    @property
    def reads_policy(self) -> bool:
        """Whether the policy's own pass gives the states: `read` them, instead of a pass of its own."""
        return self.kind in ("head", "detached_head")

    def attach(self, source: Any, policy: nn.Module) -> None:
        """Build what the kind needs, once, after the policy and its reference. No random number of the run is used.

        Raises UserError where the base that an adapter would share is itself trained.
        """
        config: Any = causal_lm(policy).config.get_text_config()
        head: Any = nn.utils.skip_init(nn.Linear, config.hidden_size, 1)  # draws nothing
        self.head = head
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        if self.kind == "adapter":
            _add_adapter(policy)
        elif self.kind == "model":
            self.model = _model_like(source, policy)

    def trained(self, policy: nn.Module) -> list[nn.Parameter]:
        """What its loss trains, besides the policy's states under kind "head"."""
        found = list(self.parameters())
        if self.kind == "adapter":
            found += adapter_parameters(policy, CRITIC).values()
        return [parameter for parameter in found if parameter.requires_grad]

    def forward(self, policy: nn.Module, batch: Batch, *, path: str = "auto") -> Tensor:
        """Values (N, C), float32: V of the state before each token, 0 outside the mask; one pass of its own.

        path: as in `completion_logprobs`. For the two kinds of head, where the policy's pass gives the states: `read`.
        """
        if self.kind == "adapter":
            with use_adapter(policy, CRITIC):
                return self._values(completion_states(policy, batch, path=path), batch)
        model = policy if self.model is None else self.model
        return self._values(self._kept(completion_states(model, batch, path=path)), batch)

    def read(self, scores: TokenScores, batch: Batch) -> Tensor:
        """The same from the states of a pass that the policy made anyway (`completion_logprobs(..., states=True)`)."""
        assert scores.states is not None, "the policy's pass was not asked for its states"
        return self._values(self._kept(scores.states), batch)

    def _kept(self, states: Tensor) -> Tensor:
        return states.detach() if self.kind == "detached_head" else states

    def _values(self, states: Tensor, batch: Batch) -> Tensor:
        """In float32 also under autocast: returns differ in digits that bfloat16 does not have."""
        assert self.head is not None, "attach() comes first"
        mask = batch.completion_mask
        with torch.autocast(states.device.type, enabled=False):
            flat = self.head(states.to(self.head.weight.dtype)).squeeze(-1).float()
        return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def _add_adapter(policy: nn.Module) -> None:
    """The second adapter: a copy of the policy's, trainable. Its part in the vocabulary head is never read."""
    shared = [name for name in trainable_state(policy) if not is_of_adapter(name, POLICY)]
    if shared:
        raise UserError(
            f"{len(shared)} weights of the base are trained besides the policy's adapter ({shared[0]}, ...), so the "
            "critic cannot share it: type algorithm.critic=model"
        )
    copy_adapter(policy, CRITIC)
    unread = _unread(policy)
    for parameter in adapter_parameters(policy, CRITIC).values():
        parameter.requires_grad_(id(parameter) not in unread)
    recompute_with_same_adapter(policy)


def _model_like(source: Any, policy: nn.Module) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        model: nn.Module = source.policy()
    own, start = trainable_state(model), trainable_state(policy)
    for name, tensor in own.items():
        tensor.copy_(start[name])
    unread = _unread(model)
    for parameter in model.parameters():
        if id(parameter) in unread:
            parameter.requires_grad_(False)
    return model


def _unread(model: nn.Module) -> set[int]:
    """Ids of the weights of the vocabulary head, unless they are the input embeddings too: no value depends on them,
    and a weight that never gets a gradient stops processes that wait for it."""
    causal: Any = causal_lm(model)
    embeddings = {id(parameter) for parameter in causal.get_input_embeddings().parameters()}
    return {id(parameter) for parameter in causal.get_output_embeddings().parameters()} - embeddings
