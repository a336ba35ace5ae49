"""Keys and values that grow in place: a step of decoding writes its own positions instead of copying all that came before."""

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_SPARE = 32
"""Positions that are made room for at once: more than a suggestion is long."""


class GrowingLayer(DynamicLayer):
    """One layer; `keys` and `values` [R, H, T, D] are views of tensors with room for more positions, until somebody replaces them."""

    _room: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Add positions; returns all of them."""
        have, more = self.get_seq_length(), key_states.shape[-2]
        if not have:
            return super().update(key_states, value_states, *args, **kwargs)
        held: tuple[Any, Any] = self.keys, self.values
        if self._room is None or not _fits(held[0], self._room[0], have + more):
            self._room = _make_room(held[0], have + more), _make_room(held[1], have + more)
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, have : have + more] = new
        self.keys, self.values = (room[:, :, : have + more] for room in self._room)
        return self.keys, self.values


def _fits(held: torch.Tensor, room: torch.Tensor, positions: int) -> bool:
    """Whether what is held is still the view that the layer made, and there is room for so many positions."""
    return held.data_ptr() == room.data_ptr() and held.shape[0] == room.shape[0] and positions <= room.shape[2]


def _make_room(held: torch.Tensor, positions: int) -> torch.Tensor:
    rows, heads, have, size = held.shape
    room = held.new_empty(rows, heads, positions + _SPARE, size)
    room[:, :, :have] = held
    return room


def growing_cache() -> DynamicCache:
    """An empty cache of growing layers."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = GrowingLayer
    return cache
