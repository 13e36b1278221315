"""Keys and values of the rows being decoded, in buffers that rows enter and leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

# Buffers get room for this many more columns than needed, or half as many again, so that they are seldom copied.
SPARE_COLUMNS = 64


class Window:
    """Which part of the buffers is in use: rows [0, rows), columns [start, end); the next token goes to column end."""

    def __init__(self) -> None:
        self.rows = self.start = self.end = 0


class SlotLayer(CacheLayerMixin):
    """Buffers (slots, heads, columns, head dim) of one layer; `update` writes one column and returns the window."""

    is_sliding = False

    def __init__(self, window: Window, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.window, self.is_initialized = window, True
        self.keys: Any = keys
        self.values: Any = values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers exist before the first forward."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, start, end = self.window.rows, self.window.start, self.window.end
        self.keys[:rows, :, end] = key_states[:, :, 0]
        self.values[:rows, :, end] = value_states[:, :, 0]
        return self.keys[:rows, :, start : end + 1], self.values[:rows, :, start : end + 1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.end - self.window.start + query_length, 0

    def get_seq_length(self) -> int:
        return self.window.end - self.window.start

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """A cache whose rows all write the same column, each seeing the columns from its own offset on.

    A row that enters at column e with a context of length P gets columns [e - P, e): contiguous, so masks made of
    distances (sliding windows) are right, and its position is simply column - offset. Columns that no row sees any
    more are dropped when the buffers are full.
    """

    def __init__(self, num_slots: int, like: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        """like: of each model, keys and values (any, heads, any, head dim) of every layer, for shapes, number format
        and device. `parts` are the caches to pass to the models, one each; they share buffers and window with this one.
        """
        self.num_slots, self.window, self.capacity = num_slots, Window(), 0

        def empty(tensor: Tensor) -> Tensor:
            return tensor.new_empty(num_slots, tensor.shape[1], 0, tensor.shape[3])

        of_model = [[SlotLayer(self.window, empty(keys), empty(values)) for keys, values in states] for states in like]
        self.slot_layers = [layer for layers in of_model for layer in layers]
        self.parts = [Cache(layers=[*layers]) for layers in of_model]
        super().__init__(layers=[*self.slot_layers])

    def buffers(self) -> list[tuple[SlotLayer, str, Tensor]]:
        return [(layer, name, getattr(layer, name)) for layer in self.slot_layers for name in ("keys", "values")]

    def load(self, slots: Tensor, states: Sequence[Sequence[tuple[Tensor, Tensor]]], rows: Tensor) -> None:
        """Copy `rows` of left-padded keys and values (any, heads, L, head dim) to `slots`, columns [end - L, end)."""
        length = states[0][0][0].shape[2]
        columns = slice(self.window.end - length, self.window.end)
        sources = [tensor for of_model in states for pair in of_model for tensor in pair]
        for (_, _, buffer), source in zip(self.buffers(), sources, strict=True):
            buffer[:, :, columns].index_copy_(0, slots, source[rows])

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy what slots `source` hold to slots `target`."""
        columns = slice(self.window.start, self.window.end)
        for _, _, buffer in self.buffers():
            buffer[:, :, columns].index_copy_(0, target, buffer[:, :, columns][source])

    def make_room(self, end: int | None = None) -> None:
        """Move the window to end at column `end` (None: to start at 0), with room for more columns behind it."""
        width = self.window.end - self.window.start
        end = width if end is None else max(end, width)
        capacity = max(self.capacity, end + max(SPARE_COLUMNS, end // 2))
        old, new = slice(self.window.start, self.window.end), slice(end - width, end)
        for layer, name, buffer in self.buffers():
            # Zeros: masked columns are multiplied by 0, which what an empty buffer happens to hold may survive.
            fresh = buffer.new_zeros(self.num_slots, buffer.shape[1], capacity, buffer.shape[3])
            fresh[: self.window.rows, :, new] = buffer[: self.window.rows, :, old]
            setattr(layer, name, fresh)
        self.capacity, self.window.start, self.window.end = capacity, new.start, new.stop


def states_of(cache: Cache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every layer of a cache that one forward filled."""
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


def mask_of(offsets: Tensor, window: Window) -> Tensor:
    """(R, columns) bool: which columns of the window, the next one included, a row sees."""
    columns = torch.arange(window.start, window.end + 1, device=offsets.device)
    return columns >= offsets[:, None]
