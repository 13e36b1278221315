"""Sampling in this process with the policy's own transformers model."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from alignment.errors import UserError
from alignment.model.logprobs import causal_lm
from alignment.rollout.decoding import Context, Decoder, Partner, Row, Settings
from alignment.rollout.weight_copy import WeightCopy

DTYPES = {"auto": None, "policy": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
_log = logging.getLogger(__name__)


@dataclass
class Completions:
    """N completions, those of prompt p at p * group_size onwards.

    ids: sampled tokens, the stop token included. logprobs: of each of them, under softmax(logits / temperature) of the
    whole vocabulary (temperature 0: of softmax(logits)). finished: it ended with a stop token, not at the length limit.
    """

    ids: list[list[int]]
    logprobs: list[list[float]]
    finished: list[bool]


@dataclass(frozen=True)
class Mixture:
    """Sample from the token-wise geometric mixture of the policy and another model, as Nash-MD's opponent is made.

    other: a context that gives the other model; it may be the policy itself in another state (adapter off).
    coef: its weight, between 0 (the policy alone) and 1 (the other alone).
    """

    other: Callable[[], AbstractContextManager[nn.Module]]
    coef: float


class HFEngine:
    """Completes prompts: each prompt computed once for its group, finished rows replaced by waiting ones.

    Only the settings given here or to `generate` act, never the checkpoint's generation config. What completion n
    becomes depends on (seed, n, weights) alone, up to the last bits in which differently shaped products differ.

    dtype: what to sample with. "policy": the policy as it is; "float32" or "bfloat16": a copy of its weights in that
    format, adapters merged; "auto": such a copy in autocast's format where autocast is on, else the policy.
    max_batch: completions decoded at a time, halved for good when memory runs out.
    """

    def __init__(
        self,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        dtype: str = "auto",
        max_batch: int = 128,
    ) -> None:
        if dtype not in DTYPES:
            raise UserError(f"rollout.dtype: {dtype!r} is none of {', '.join(DTYPES)}: type rollout.dtype=auto")
        if max_batch < 1:
            raise UserError(f"rollout.max_batch: {max_batch} is less than 1: type rollout.max_batch=128")
        self.max_new_tokens, self.temperature, self.top_p, self.top_k = max_new_tokens, temperature, top_p, top_k
        self.dtype, self.max_batch = dtype, max_batch
        self._synced: weakref.ref[nn.Module] | None = None
        self._state: object = None
        self._compute_dtype: torch.dtype | None = None
        self._copy: WeightCopy | None = None

    # ---- weights ----------------------------------------------------------------------------------------------------
    def sync(self, policy: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        """Take over the policy's weights. To be called before sampling whenever they have changed.

        compute_dtype: the number format of training, for dtype="auto"; None = autocast's, where it is on.
        """
        if self._synced is None or self._synced() is not policy:
            self._synced, self._compute_dtype = weakref.ref(policy), self._choose(policy, compute_dtype)
            self._copy = self._try_copy(policy) if self._compute_dtype else None
        elif self._copy is not None:
            self._copy.refresh(policy)
        self._state = state_of(policy)

    def _choose(self, policy: nn.Module, compute_dtype: torch.dtype | None) -> torch.dtype | None:
        """Number format of the copy, None = no copy: none is asked for, or it would equal the policy."""
        base = causal_lm(policy)
        chosen = DTYPES[self.dtype]
        if self.dtype == "auto":
            device = next(policy.parameters()).device.type
            if compute_dtype is None and torch.is_autocast_enabled(device):
                compute_dtype = torch.get_autocast_dtype(device)
            short = compute_dtype in (torch.bfloat16, torch.float16)
            # A quantised policy is one for which memory is short: no second model unless it is asked for.
            chosen = compute_dtype if short and not getattr(base, "is_quantized", False) else None
        plain = policy is base and {p.dtype for p in policy.parameters()} == {chosen}
        return None if plain else chosen

    def _try_copy(self, policy: nn.Module) -> WeightCopy | None:
        assert self._compute_dtype is not None
        try:
            return WeightCopy(policy, self._compute_dtype)
        except UserError as error:
            _log.warning("sampling with the policy itself, which may be slower: %s", error)
            return None

    def _model_for(self, policy: nn.Module) -> nn.Module:
        """What samples for `policy`: its copy, brought up to date where it visibly is not, or itself."""
        if self._synced is None:
            self.sync(policy)
        if self._copy is None or self._synced is None or self._synced() is not policy:
            return policy
        if self._state != state_of(policy):
            self.sync(policy)
        return self._copy.model

    # ---- sampling ---------------------------------------------------------------------------------------------------
    def generate(
        self,
        policy: nn.Module,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int,
        stop_ids: Collection[int],
        pad_id: int,
        seed: int,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        mixture: Mixture | None = None,
    ) -> Completions:
        """`group_size` completions of each prompt (lists of token ids). What is None is as in the constructor.

        The policy is sampled in eval mode and left as it was, the global random state too. A policy other than the one
        synced last is sampled as it is, without a copy. mixture: another model has a say in every token; temperature,
        top_p, top_k and the log-probs are then the mixture's.
        Raises UserError for an empty prompt, a prompt too long for the model, a setting out of range, a model whose
        state between tokens is more than keys and values, logits that are not finite.
        """
        settings = Settings(
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
            temperature=self.temperature if temperature is None else temperature,
            top_p=self.top_p if top_p is None else top_p,
            top_k=self.top_k if top_k is None else top_k,
            stop_ids=frozenset(stop_ids),
            pad_id=pad_id,
            seed=seed,
        )
        model = self._model_for(policy)
        causal = causal_lm(model)
        check_request(settings, prompts, group_size, _num_positions(causal.config))
        rows = [Row(i, prompts[i // group_size]) for i in range(len(prompts) * group_size)]
        groups = [rows[i : i + group_size] for i in range(0, len(rows), group_size)]
        with ExitStack() as stack:
            partner = None if mixture is None else partner_of(model, mixture, stack)
            stack.enter_context(evaluating(model, autocast=model is policy))
            decoder = Decoder(causal, settings, self.max_batch, partner)
            try:
                decoder.run([Context(prompt, group) for prompt, group in zip(prompts, groups, strict=True)])
            finally:
                self.max_batch = decoder.max_batch
        return Completions([r.ids for r in rows], [r.logprobs for r in rows], [r.finished for r in rows])


def partner_of(model: nn.Module, mixture: Mixture, stack: ExitStack) -> Partner:
    """The other model of a mixture, in eval mode until `stack` closes.

    Where it is the sampled model in another state, that state is put on around each of its forwards, else once. Its
    forwards run under the caller's autocast, whether or not the sampled model's do.
    """
    with ExitStack() as opened:
        other = opened.enter_context(mixture.other())
        shared = other is model
        if not shared:
            stack.push(opened.pop_all())
            stack.enter_context(evaluating(other, autocast=True))
    device = next(other.parameters()).device.type
    autocast = torch.is_autocast_enabled(device)

    @contextmanager
    def active() -> Iterator[None]:
        with ExitStack() as states:
            states.enter_context(torch.autocast(device, enabled=autocast))
            if shared:
                states.enter_context(mixture.other())
            yield

    return Partner(causal_lm(other), mixture.coef, active)


@contextmanager
def evaluating(model: nn.Module, *, autocast: bool) -> Iterator[None]:
    """No gradients, eval mode, each module's own mode restored whatever happens. Autocast only for what needs it."""
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device.type
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad(), torch.autocast(device, enabled=autocast and torch.is_autocast_enabled(device)):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        # Weights cast here without a gradient must not be what training under the same autocast finds in its cache.
        torch.clear_autocast_cache()


def check_request(settings: Settings, prompts: Sequence[Sequence[int]], group_size: int, limit: int | None) -> None:
    ranges = [
        ("max_new_tokens", settings.max_new_tokens >= 1, "at least 1", "64"),
        ("temperature", settings.temperature >= 0, "0 (greedy) or more", "1.0"),
        ("top_p", 0 < settings.top_p <= 1, "more than 0 and at most 1", "1.0"),
        ("top_k", settings.top_k >= 0, "0 (off) or more", "0"),
    ]
    for name, holds, allowed, example in ranges:
        if not holds:
            raise UserError(
                f"rollout.{name}: {getattr(settings, name)} is not {allowed}: type rollout.{name}={example}"
            )
    if group_size < 1 or not prompts:
        raise UserError(f"nothing to sample: {len(prompts)} prompts, {group_size} completions of each")
    if empty := [i for i, prompt in enumerate(prompts) if not len(prompt)]:
        raise UserError(f"prompt {empty[0]} is empty: a completion needs at least one token before it (a BOS)")
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    if limit is not None and len(prompts[longest]) + settings.max_new_tokens > limit:
        raise UserError(
            f"prompt {longest} has {len(prompts[longest])} tokens and up to {settings.max_new_tokens} are sampled, but "
            f"the model has {limit} positions: lower rollout.max_new_tokens or encoding.max_prompt_tokens"
        )


def _num_positions(config) -> int | None:
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def state_of(policy: nn.Module) -> tuple:
    """Changes when weights are updated in place, replaced, or another adapter is switched on."""
    weights = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in policy.parameters()]
    # The attributes of PEFT's layers; its own properties of these names are methods on some models.
    adapters = [
        (module._disable_adapters, str(module._active_adapter))
        for module in policy.modules()
        if hasattr(module, "_disable_adapters") and hasattr(module, "_active_adapter")
    ]
    return weights, adapters
