"""The verdict head, fitted to suggestions whose truth is known: it finds what is right, where to cut, and keeps its coverage."""

import math

import numpy as np
import pytest

from keepgrad.policy.verdict import FEATURES, SIZE, Head, always
from keepgrad.records import Draft, Sample
from keepgrad.reward.spec import load
from keepgrad.train.head import calibrated, fit_head

SPEC = load()
MEAN = FEATURES.index("mean_logp")
SIZES = (6, 12, 24)


def _window(count: int, seed: int, settled: bool = True, cut_shown: int = 2) -> list[Sample]:
    """Drafts with three cuts. Each grows less sure along its way, and is right up to a cut as its confidence there says."""
    draw, made = np.random.default_rng(seed), []
    for index in range(count):
        context, sure = draw.normal(size=len(FEATURES)), draw.normal() - 0.3
        rows, right = [], []
        luck = draw.random()
        for at, size in enumerate(SIZES):
            row = context.copy()
            row[SIZE], row[MEAN] = math.log1p(size), sure - 0.8 * at
            rows.append(row.tolist())
            right.append(bool(luck < 1 / (1 + math.exp(-2 * row[MEAN]))))
        taken = float(right[cut_shown] and draw.random() < 0.9)
        made.append(
            Sample(
                generation=f"g{index}",
                version="v",
                prompt_ids=[1, 2],
                completion_ids=[3, 4, 5],
                logprobs=[-0.1] * 3,
                cuts=[1, 2, 3],
                features=rows,
                cut=cut_shown + 1,
                right=right if settled else [],
                shown=True,
                taken=taken,
                verdict_logprob=0.0,
                reward=taken - 0.25,
                advantages=[0.0] * 4,
                settled_ids=[],
                weight=1.0,
                bucket=0,
            )  # fmt: skip
        )
    return made


def _served(head: Head, window: list[Sample]) -> list[tuple[Sample, int]]:
    """What the head would show, at which cut."""
    best = [(sample, *head.best(np.array(sample.features))) for sample in window]
    return [(sample, at) for sample, at, worth in best if worth >= head.least]


def test_the_head_cuts_where_drafts_go_wrong_and_keeps_its_coverage() -> None:
    head, held = fit_head(always(), _window(1000, 0), SPEC, 0.6), _window(2000, 1)
    served = _served(head, held)
    whole = np.mean([sample.right[-1] for sample in held])
    assert len(served) / len(held) == pytest.approx(0.6, abs=0.05)
    assert np.mean([sample.right[at] for sample, at in served]) > 1.8 * whole
    assert len({at for _, at in served}) == len(SIZES), "sure drafts are shown whole, others in part"
    gained = sum(SIZES[at] * sample.right[at] for sample, at in served)
    assert gained > sum(SIZES[-1] * sample.right[-1] for sample in held), "and more characters are right, though fewer are shown"


def test_a_chance_it_states_is_the_chance_there_is() -> None:
    """Calibration on held-out drafts: of the cuts that are said to be taken with chance q, a share q is right (a tenth is not taken)."""
    head, held = fit_head(always(), _window(1000, 2), SPEC, 0.6), _window(3000, 3)
    q = np.concatenate([head.chance(np.array(sample.features)) for sample in held])
    right = np.concatenate([sample.right for sample in held])
    for low, high in ((0.1, 0.3), (0.3, 0.5), (0.5, 0.7), (0.7, 0.9)):
        inside = (q >= low) & (q < high)
        assert inside.sum() > 200 and 0.9 * right[inside].mean() + 0.03 * (1 - right[inside].mean()) == pytest.approx(
            q[inside].mean(), abs=0.08
        )


def test_what_the_developer_wrote_instead_teaches_more_than_the_verdict_alone() -> None:
    """Hindsight: cuts that nobody was shown are judged by the settled line."""
    held = _window(2000, 4)

    def value(head: Head) -> float:
        return sum(SIZES[at] * sample.right[at] for sample, at in _served(head, held))

    told, untold = fit_head(always(), _window(300, 5), SPEC, 0.7), fit_head(always(), _window(300, 5, settled=False), SPEC, 0.7)
    assert value(told) > 1.02 * value(untold)


def test_coverage_is_of_all_opportunities_and_blank_drafts_are_never_shown() -> None:
    """A fifth of the drafts is blank: the floor of 0.6 then takes three quarters of the others."""
    from msgspec.structs import replace

    made = [replace(s, cuts=[], features=[], cut=0, right=[], shown=False) if i % 5 == 0 else s for i, s in enumerate(_window(500, 6))]
    head = fit_head(always(), made, SPEC, 0.6)
    assert len(_served(head, [sample for sample in made if sample.cuts])) / len(made) == pytest.approx(0.6, abs=0.01)


def test_too_few_shown_suggestions_leave_the_parents_head() -> None:
    parent = fit_head(always(), _window(200, 7), SPEC, 0.6)
    assert fit_head(parent, _window(10, 8), SPEC, 0.6) is parent


def test_a_child_starts_from_its_parent() -> None:
    """The parent is the prior: after a small window the child is nearer to it than a head fitted to that window alone."""
    parent, small = fit_head(always(), _window(2000, 9), SPEC, 0.6), _window(40, 10)
    child, alone = fit_head(parent, small, SPEC, 0.6), fit_head(always(), small, SPEC, 0.6)
    held = np.concatenate([np.array(sample.features) for sample in _window(300, 11)])
    assert np.abs(child.chance(held) - parent.chance(held)).mean() < np.abs(alone.chance(held) - parent.chance(held)).mean()


def test_coverage_is_that_of_the_candidates_own_drafts() -> None:
    """A candidate that has become surer of itself would show more than was asked for; a third of the window drafted anew tells."""
    window, held = _window(600, 12), _window(2000, 13)
    head = fit_head(always(), window, SPEC, 0.6)

    def surer(sample: Sample) -> list[list[float]]:
        return [[value + 1.0 if at == MEAN else value for at, value in enumerate(row)] for row in sample.features]

    def share(head: Head) -> float:
        return float(np.mean([head.best(np.array(surer(sample)))[1] >= head.least for sample in held]))

    own = {one.generation: Draft("v", [3], [-0.1], one.cuts, surer(one), "show", 0.0, 1.0, 1, "x", "stop") for one in window[::3]}
    moved = calibrated(head, window, own, 0.6)
    assert share(head) > 0.75 and share(moved) == pytest.approx(0.6, abs=0.06)
    assert calibrated(head, window, {}, 0.6) is head, "nothing drafted anew, nothing moved"


def test_without_cuts_drafts_are_shown_whole_or_not_at_all() -> None:
    head, held = fit_head(always(), _window(400, 14), SPEC, 0.6, cuts=False), _window(500, 15)
    assert {at for _, at in _served(head, held)} == {len(SIZES) - 1}
    lucks = np.random.default_rng(0).random((500, 2))
    verdicts = [head.verdict(sample.features, 0.1, *luck) for sample, luck in zip(held, lucks.tolist(), strict=True)]
    assert {verdict.which for verdict in verdicts} == {len(SIZES) - 1}
    assert all(math.isclose(math.exp(one.logprob), one.show_probability if one.shown else 1 - one.show_probability) for one in verdicts)
