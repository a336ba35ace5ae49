"""Samples to tensors: rows of continuations behind their contexts, log-probs asked for only where something is learned.

A row is one continuation of one sample: its draft (policy-gradient term) or the developer's settled line (distillation term).
Shapes: R rows, C longest context, T longest continuation, N learned positions of a packed row.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from keepgrad.errors import TrainError
from keepgrad.records import Sample


class Rows(NamedTuple):
    """Padded rows of one micro-batch. `context` [R, C] left-padded without its last token; `inputs` [R, T] from the last context token on;
    `targets` [R, T] with `learned` [R, T] true where a target stands; `behaviour` and `advantage` [R, T] of draft rows (0 elsewhere);
    `settled` [R] true for distillation rows; `weight` [R]; `samples` the index of each row's sample."""

    context: torch.Tensor
    context_mask: torch.Tensor
    inputs: torch.Tensor
    targets: torch.Tensor
    learned: torch.Tensor
    behaviour: torch.Tensor
    advantage: torch.Tensor
    settled: torch.Tensor
    weight: torch.Tensor
    samples: list[int]


class Packed(NamedTuple):
    """Whole sequences packed into one row [1, L] with a block-diagonal causal mask; `where` [N]: positions whose next token is learned."""

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    where: torch.Tensor


def check(samples: Sequence[Sample]) -> None:
    """Raises TrainError, naming the generation, where lengths do not match: nothing is padded or guessed (P2)."""
    if not samples:
        raise TrainError("the window holds no sample to train on: collect more traffic, or see `keepgrad audit` for where it went")
    for sample in samples:
        ids, logprobs, advantages = len(sample.completion_ids), len(sample.logprobs), len(sample.advantages)
        if logprobs != ids or advantages != ids + 1:
            raise TrainError(
                f"generation {sample.generation} has {ids} completion ids, {logprobs} log-probs and {advantages} advantages "
                f"(wanted {ids + 1}): its record is damaged, exclude it or restore the segment"
            )


def minibatches(samples: Sequence[Sample], size: int, seed: int) -> list[list[int]]:
    """Indices of samples, shuffled by seed, in minibatches of `size`; a last one under half of that joins the one before."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    parts = [order[at : at + size] for at in range(0, len(order), size)]
    if len(parts) > 1 and len(parts[-1]) < size // 2:
        parts[-2] += parts.pop()
    return parts


def rows(samples: Sequence[Sample], chosen: Sequence[int], settled_weight: float, policy_weight: float, most: int) -> Iterator[Rows]:
    """Micro-batches of at most `most` samples, alike in length, so that little is padding.

    A draft's row ends where the draft was cut; a silent sample has none.
    """
    order = sorted(chosen, key=lambda i: max(samples[i].cut, len(samples[i].settled_ids)))
    for at in range(0, len(order), most):
        plan = []
        for index in order[at : at + most]:
            sample = samples[index]
            if policy_weight and any(sample.advantages[:-1]):
                plan.append((index, sample.completion_ids[: sample.cut], False))
            if settled_weight and sample.settled_ids:
                plan.append((index, sample.settled_ids, True))
        if plan:
            yield _rows(samples, plan)


def _rows(samples: Sequence[Sample], plan: Sequence[tuple[int, list[int], bool]]) -> Rows:
    count = len(plan)
    width = max(len(samples[index].prompt_ids) for index, _, _ in plan) - 1
    length = max(len(ids) for _, ids, _ in plan)
    context, context_mask = (torch.zeros(count, width, dtype=torch.long) for _ in range(2))
    inputs, targets = (torch.zeros(count, length, dtype=torch.long) for _ in range(2))
    learned = torch.zeros(count, length, dtype=torch.bool)
    behaviour, advantage = (torch.zeros(count, length) for _ in range(2))
    for at, (index, ids, settled) in enumerate(plan):
        sample, n = samples[index], len(ids)
        prompt = sample.prompt_ids
        context[at, width - len(prompt) + 1 :] = torch.tensor(prompt[:-1])
        context_mask[at, width - len(prompt) + 1 :] = 1
        inputs[at, :n] = torch.tensor([prompt[-1], *ids[:-1]])
        targets[at, :n] = torch.tensor(ids)
        learned[at, :n] = True
        if not settled:
            behaviour[at, :n] = torch.tensor(sample.logprobs[:n])
            advantage[at, :n] = torch.tensor(sample.advantages[:n])
    flags = torch.tensor([settled for _, _, settled in plan])
    weight = torch.tensor([samples[index].weight for index, _, _ in plan])
    return Rows(context, context_mask, inputs, targets, learned, behaviour, advantage, flags, weight, [index for index, _, _ in plan])


def pack(batch: Rows) -> Packed:
    """The rows' whole sequences, without any padding, one behind the other; each attends to itself only."""
    parts: list[tuple[torch.Tensor, ...]] = []
    start = 0
    for index in range(batch.inputs.shape[0]):
        context = batch.context[index][batch.context_mask[index].bool()]
        tokens = batch.inputs[index][batch.learned[index]]
        whole = torch.cat([context, tokens])
        learned = start + len(context) + torch.arange(len(tokens))
        parts.append((whole, torch.arange(len(whole)), torch.full_like(whole, index), learned))
        start += len(whole)
    ids, positions, owners, where = (torch.cat(column) for column in zip(*parts, strict=True))
    total = len(owners)
    allowed = (owners[:, None] == owners[None, :]) & torch.ones(total, total, dtype=torch.bool).tril()
    return Packed(ids[None], positions[None], allowed[None, None], where)
