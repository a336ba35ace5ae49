"""Keys and values that grow in place are those that transformers' own layer would hold, whatever is done to them in between."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer

from keepgrad.policy.kv import GrowingLayer

STEPS = st.lists(st.one_of(st.integers(1, 40), st.sampled_from(["select", "trim", "join"])), min_size=1, max_size=12)


@given(STEPS, st.integers(0, 2**31))
def test_a_growing_layer_holds_what_the_plain_one_does(steps: list[int | str], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    ours, plain = GrowingLayer(), DynamicLayer()  # type: ignore[no-untyped-call]

    def new(rows: int, positions: int) -> torch.Tensor:
        return torch.randn(rows, 2, positions, 4, generator=draw)

    first = new(3, 5), new(3, 5)
    for layer in (ours, plain):
        layer.update(*first)
    for step in steps:
        rows = plain.keys.shape[0]
        if isinstance(step, int):
            more = new(rows, step), new(rows, step)
            told = ours.update(*more)
            for found, wanted in zip(told, plain.update(*more), strict=True):
                assert torch.equal(found, wanted)
        elif step == "select":
            chosen = torch.randperm(rows, generator=draw)[: max(rows - 1, 1)]
            for layer in (ours, plain):
                layer.batch_select_indices(chosen)
        elif step == "trim":
            for layer in (ours, plain):
                layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]
        else:
            other = new(1, plain.keys.shape[2])
            for layer in (ours, plain):
                layer.keys, layer.values = torch.cat([layer.keys, other]), torch.cat([layer.values, other])
        assert torch.equal(ours.keys, plain.keys) and torch.equal(ours.values, plain.values)
