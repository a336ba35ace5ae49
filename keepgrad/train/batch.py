"""Samples to tensors: rows of continuations behind their contexts, log-probs asked for only where something is learned.

A row is one continuation of one sample: its draft up to the cut (policy gradient) or the developer's settled line (distillation).
Shapes: R rows, C longest context, T longest continuation, N learned positions of a packed row.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from keepgrad.errors import TrainError
from keepgrad.records import Sample


class Rows(NamedTuple):
    """Padded rows of one micro-batch. `context` [R, C] left-padded without its last token; `inputs` [R, T] from the last context token on;
    `targets` [R, T] with `learned` [R, T] true where a target stands; `behaviour` and `advantage` [R, T] of drafts, 0 for settled lines,
    which `settled` says they are; `weight` [R]."""

    context: torch.Tensor
    context_mask: torch.Tensor
    inputs: torch.Tensor
    targets: torch.Tensor
    learned: torch.Tensor
    behaviour: torch.Tensor
    advantage: torch.Tensor
    settled: bool
    weight: torch.Tensor


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


def drafted(sample: Sample) -> bool:
    """Whether its draft is learned from: not if nobody saw it, and not if it was just as expected."""
    return any(sample.advantages[:-1])


def continuation(sample: Sample, settled: bool) -> list[int]:
    """Ids of the settled line, or of the draft up to where it was cut."""
    return sample.settled_ids if settled else sample.completion_ids[: sample.cut]


def minibatches(chosen: Sequence[int], size: int, seed: int) -> list[list[int]]:
    """Indices of samples, shuffled by seed, in minibatches of `size`; a last one under half of that joins the one before."""
    order = [chosen[at] for at in torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed)).tolist()]
    parts = [order[at : at + size] for at in range(0, len(order), size)]
    if len(parts) > 1 and len(parts[-1]) < size // 2:
        parts[-2] += parts.pop()
    return parts


def rows(samples: Sequence[Sample], chosen: Sequence[int], settled: bool, most: int) -> Iterator[Rows]:
    """Micro-batches of at most `most` rows, alike in length, so that little is padding: settled lines or drafts of the chosen samples."""
    order = sorted(chosen, key=lambda i: len(continuation(samples[i], settled)))
    for at in range(0, len(order), most):
        yield _rows([samples[i] for i in order[at : at + most]], settled)


def _rows(samples: Sequence[Sample], settled: bool) -> Rows:
    count, ids = len(samples), [continuation(sample, settled) for sample in samples]
    width, length = max(len(sample.prompt_ids) for sample in samples) - 1, max(len(row) for row in ids)
    context, context_mask = (torch.zeros(count, width, dtype=torch.long) for _ in range(2))
    inputs, targets = (torch.zeros(count, length, dtype=torch.long) for _ in range(2))
    learned = torch.zeros(count, length, dtype=torch.bool)
    behaviour, advantage = (torch.zeros(count, length) for _ in range(2))
    for at, (sample, row) in enumerate(zip(samples, ids, strict=True)):
        prompt, n = sample.prompt_ids, len(row)
        context[at, width - len(prompt) + 1 :] = torch.tensor(prompt[:-1])
        context_mask[at, width - len(prompt) + 1 :] = 1
        inputs[at, :n] = torch.tensor([prompt[-1], *row[:-1]])
        targets[at, :n] = torch.tensor(row)
        learned[at, :n] = True
        if not settled:
            behaviour[at, :n] = torch.tensor(sample.logprobs[:n])
            advantage[at, :n] = torch.tensor(sample.advantages[:n])
    weight = torch.tensor([sample.weight for sample in samples])
    return Rows(context, context_mask, inputs, targets, learned, behaviour, advantage, settled, weight)


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
