"""The decode loop: contexts are prefilled, rows take slots, decode together, leave, and make room for the next."""

from __future__ import annotations

import inspect
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from alignment.batch import pad
from alignment.errors import UserError
from alignment.losses.online import mixture_logprobs
from alignment.rollout.kv_slots import SlotCache, mask_of, states_of
from alignment.rollout.sampling import sample, uniform

# What PyTorch says when memory is short, besides raising torch.OutOfMemoryError.
MEMORY_FAULTS = ("not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
# Slots are closed up once one in so many of them is empty and nothing waits for them.
CLOSE_UP_SHARE = 16
# Most tokens, padding included, of one prefill of several contexts: more is no faster and takes memory.
PREFILL_TOKENS = 8192
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """How tokens are drawn and when a completion ends. temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop_ids: frozenset[int]
    pad_id: int
    seed: int


@dataclass(frozen=True)
class Partner:
    """A second model that has a say in every token: softmax((1 - coef) * the first's logits + coef * its own).

    active: what has to be on around each of its forwards, where it is the first model in another state.
    """

    model: PreTrainedModel
    coef: float
    active: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass
class Row:
    """One completion: its number, the prompt before it, what was sampled so far."""

    index: int
    prompt: Sequence[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


@dataclass
class Context:
    """Token ids that are computed once for all rows that start from them."""

    ids: Sequence[int]
    rows: list[Row]


@dataclass
class Prefilled:
    """Rows that may take a slot, and the keys and values they start from: each row with its line in them."""

    states: list[list[tuple[Tensor, Tensor]]]  # of each model
    length: int
    rows: deque[tuple[Row, int]]


class Decoder:
    """Completes rows with one model, or with two whose logits are mixed. `run` is called once.

    Of two models each has its own keys and values, in layers of one cache: rows enter, move and leave for both at once.
    At most `max_batch` rows decode at a time. A forward that runs out of memory halves `max_batch`, which the caller
    may read back; rows that lose their slot start again from what they have.
    """

    def __init__(
        self, model: PreTrainedModel, settings: Settings, max_batch: int, partner: Partner | None = None
    ) -> None:
        self.settings, self.max_batch, self.partner = settings, max_batch, partner
        self.device = next(model.parameters()).device
        self.models = [model] if partner is None else [model, partner.model]
        self.arguments = [_arguments(each) for each in self.models]
        self.waiting: deque[Context] = deque()
        self.ready: deque[Prefilled] = deque()
        self.slots: list[Row | None] = []
        self.offsets: list[int] = []
        self.cache: SlotCache | None = None

    def run(self, contexts: Sequence[Context]) -> None:
        """Complete every row of every context, in place."""
        # Longest first: later contexts fit where earlier ones were, and those prefilled together are about as long.
        self.waiting.extend(sorted(contexts, key=lambda context: -len(context.ids)))
        while self.waiting or self.ready or any(self.slots):
            self._admit()
            if any(self.slots):
                self._step()

    # ---- rows come in -----------------------------------------------------------------------------------------------
    def _admit(self) -> None:
        """Fill the free slots, from the contexts prefilled already and then from new ones."""
        while (free := self.max_batch - sum(row is not None for row in self.slots)) and (self.ready or self.waiting):
            if not self.ready:
                self._prefill()
            else:
                self._attempt(lambda: self._enter(free))

    def _prefill(self) -> None:
        """One forward over the contexts of about half a batch of rows; draws the first token of each row."""
        chosen = self._next_contexts()
        ids, mask = (
            tensor.to(self.device) for tensor in pad([c.ids for c in chosen], left=True, value=self.settings.pad_id)
        )
        caches, positions = [DynamicCache() for _ in self.models], (mask.long().cumsum(-1) - 1).clamp(min=0)
        logits = self._attempt(lambda: self._logits(ids, mask, positions, caches))
        if logits is None:
            self.waiting.extendleft(reversed(chosen))
            return
        rows = [(row, line) for line, context in enumerate(chosen) for row in context.rows]
        for part in range(0, len(rows), self.max_batch):  # a group may be larger than a batch
            some = rows[part : part + self.max_batch]
            self._draw(logits[[line for _, line in some]], [row for row, _ in some])
        going = deque((row, line) for row, line in rows if not self._ended(row))
        if going:
            self.ready.append(Prefilled([states_of(cache) for cache in caches], ids.shape[1], going))

    def _next_contexts(self) -> list[Context]:
        chosen, num_rows, longest = [], 0, 0
        while self.waiting and num_rows < max(1, self.max_batch // 2):
            longest = max(longest, len(self.waiting[0].ids))
            if chosen and longest * (len(chosen) + 1) > PREFILL_TOKENS:
                break
            chosen.append(self.waiting.popleft())
            num_rows += len(chosen[-1].rows)
        return chosen

    def _enter(self, free: int) -> None:
        """Give slots to rows of the oldest prefill."""
        source = self.ready[0]
        cache = self._open(source)
        taken = [source.rows.popleft() for _ in range(min(free, len(source.rows)))]
        if not source.rows:
            self.ready.popleft()
        empty = [slot for slot, row in enumerate(self.slots) if row is None]
        slots = (empty + list(range(len(self.slots), self.max_batch)))[: len(taken)]
        for slot, (row, _) in zip(slots, taken, strict=True):
            if slot == len(self.slots):
                self.slots.append(None)
                self.offsets.append(0)
            self.slots[slot] = row
            # What is in the cache is everything but the row's last token, which is the next input.
            self.offsets[slot] = cache.window.end - (len(row.prompt) + len(row.ids) - 1)
        cache.load(self._tensor(slots), source.states, self._tensor([line for _, line in taken]))
        self._set_window()

    def _open(self, source: Prefilled) -> SlotCache:
        """The slots' cache, made on first use, its window ending no earlier than the contexts that come in are long."""
        if self.cache is None:
            self.cache = SlotCache(self.max_batch, source.states)
        if not any(self.slots):  # nobody looks back: start over at the left
            self.slots, self.offsets = [], []
            self.cache.window.rows = self.cache.window.start = self.cache.window.end = 0
        if source.length > self.cache.window.end or self.cache.window.end >= self.cache.capacity:
            self._make_room(source.length)
        return self.cache

    # ---- rows decode ------------------------------------------------------------------------------------------------
    def _step(self) -> None:
        """One token for every row that has a slot."""
        logits = self._attempt(self._next_logits)
        if logits is None:
            return
        window = self._buffers.window
        window.end += 1
        self._draw(logits, self.slots)
        for slot, row in enumerate(self.slots):
            if row is not None and self._ended(row):
                self.slots[slot], self.offsets[slot] = None, window.end
        self._close_up()

    def _next_logits(self) -> Tensor:
        cache = self._buffers
        if cache.window.end == cache.capacity:
            self._make_room()
        ids = self._tensor([[row.ids[-1] if row else self.settings.pad_id] for row in self.slots])
        offsets, end = self._tensor(self.offsets), cache.window.end
        return self._logits(ids, mask_of(offsets, cache.window), (end - offsets)[:, None], cache.parts)

    def _draw(self, logits: Tensor, rows: Sequence[Row | None]) -> None:
        """Append one token and its log-prob to every row."""
        settings = self.settings
        numbers = [uniform(settings.seed, row.index, len(row.ids)) if row else 0.0 for row in rows]
        uniforms = torch.tensor(numbers, dtype=torch.float64).to(self.device)
        ids, logprobs = sample(
            logits, uniforms, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p
        )
        for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            if row is None:
                continue
            if not math.isfinite(logprob):
                raise UserError(
                    f"token {len(row.ids)} of completion {row.index} has log-prob {logprob}: the model's logits are "
                    "not finite. Its weights have diverged: lower algorithm.lr, or resume from an earlier checkpoint"
                )
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.finished = token in settings.stop_ids

    def _ended(self, row: Row) -> bool:
        return row.finished or len(row.ids) == self.settings.max_new_tokens

    # ---- slots ------------------------------------------------------------------------------------------------------
    def _close_up(self) -> None:
        """Where nothing waits for the empty slots, move the last rows into them, so that fewer are computed."""
        live = [slot for slot, row in enumerate(self.slots) if row is not None]
        empty = len(self.slots) - len(live)
        if live and not (self.waiting or self.ready) and empty * CLOSE_UP_SHARE >= len(self.slots):
            self._keep(live)
        self._set_window()

    def _keep(self, live: list[int]) -> None:
        """Bring the rows of slots `live` to the front and forget every other slot."""
        source = [slot for slot in live if slot >= len(live)]
        target = [slot for slot in range(len(live)) if slot not in set(live)]
        for old, new in zip(source, target, strict=True):
            self.slots[new], self.offsets[new] = self.slots[old], self.offsets[old]
        if source:
            self._buffers.move(self._tensor(source), self._tensor(target))
        del self.slots[len(live) :], self.offsets[len(live) :]
        self._set_window()

    def _set_window(self) -> None:
        window = self._buffers.window
        window.rows, window.start = len(self.slots), min(self.offsets, default=window.end)

    def _make_room(self, end: int | None = None) -> None:
        window = self._buffers.window
        before = window.end
        self._buffers.make_room(end)
        self.offsets = [offset + window.end - before for offset in self.offsets]

    @property
    def _buffers(self) -> SlotCache:
        assert self.cache is not None  # `_enter` makes it before any row has a slot
        return self.cache

    # ---- forwards ---------------------------------------------------------------------------------------------------
    def _logits(self, ids: Tensor, mask: Tensor, positions: Tensor, caches: Sequence[Any]) -> Tensor:
        """Logits (R, V) of the last position: the model's, or the mixture's; each model writes to its own cache."""
        own = self._forward(0, ids, mask, positions, caches[0])
        if self.partner is None:
            return own
        with self.partner.active():
            other = self._forward(1, ids, mask, positions, caches[1])
        return mixture_logprobs(own.float(), other.float(), mixture_coef=self.partner.coef)

    def _forward(self, number: int, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Logits (R, V) of the last position by one of the models."""
        # As an index, not as the number 1: that would make a strided view, for which a CPU multiplies with one copy of
        # the whole head per row.
        last = self._tensor([ids.shape[1] - 1])
        values = {"attention_mask": mask, "position_ids": positions, "cache": cache, "logits_to_keep": last}
        arguments = {name: values[value] for name, value in self.arguments[number].items()}
        return self.models[number](input_ids=ids, use_cache=True, **arguments).logits[:, -1]

    def _attempt(self, work: Callable[[], T]) -> T | None:
        """What `work` returns, or None where memory ran out and the batch was made smaller for another try."""
        try:
            return work()
        except RuntimeError as error:  # of which torch.OutOfMemoryError is one
            if not is_memory_fault(error) or self.max_batch == 1:
                raise
        # Outside the handler, whose traceback keeps the forward's tensors alive.
        self._shrink()
        return None

    def _shrink(self) -> None:
        """Halve the batch. Rows lose their slots and wait, first of all, what they have now part of their context."""
        self.max_batch //= 2
        for row in reversed(self.slots):
            if row is not None:
                self.waiting.appendleft(Context([*row.prompt, *row.ids], [row]))
        self.slots, self.offsets, self.cache = [], [], None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        _log.warning("memory ran out while sampling: from now on rollout.max_batch=%d", self.max_batch)

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, device=self.device)


def is_memory_fault(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in MEMORY_FAULTS)


def _arguments(model: PreTrainedModel) -> dict[str, str]:
    """The model's own names of what is passed to it, and what that is; left out where its forward has no such thing.

    Raises UserError for a model that keeps more than keys and values between tokens.
    """
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    odd = {type(layer).__name__ for layer in layers} - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
    names = inspect.signature(model.forward).parameters
    cache = next((name for name in ("cache", "past_key_values") if name in names), None)
    if odd or cache is None:
        what = f"keeps {', '.join(sorted(odd))} between tokens" if odd else "takes no key-value cache"
        raise UserError(f"{type(model).__name__} {what}, which rollout=hf cannot batch: type rollout=vllm")
    optional = {name: name for name in ("attention_mask", "position_ids", "logits_to_keep") if name in names}
    return {**optional, cache: "cache"}
