"""Every number a Tab policy is judged by, defined once: shown rate, accept rate, accepted characters per opportunity.

Nothing in reward/ comes from here and nothing here from reward/: the judge does not borrow from the judged.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from keepgrad import stats
from keepgrad.errors import GateError


class Judged(msgspec.Struct, frozen=True):
    """One opportunity and what came of it. Made by the gate and the evaluation, eaten here.

    `context` pairs it with the same opportunity under another policy; `cluster` is what hangs together (a file, a user). `shown_chars` is 0
    when silent; `accepted_chars` at most `shown_chars`.

    >>> Judged(context="c-1", cluster="json/decoder.py", shown=True, accepted=True, accepted_chars=5, shown_chars=5)
    """

    context: str
    cluster: str
    shown: bool
    accepted: bool
    accepted_chars: int
    shown_chars: int


METRICS: dict[str, tuple[str, str]] = {
    "shown": ("shown", "opportunities"),
    "accept_rate": ("accepted", "shown"),
    "accepted_chars": ("accepted_chars", "opportunities"),
}
"""Name of a metric: the column summed above the line and the one below."""


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """Counts and rates of one policy. A rate without anything below the line is None, never 0 (P9).

    accept_rate = accepted / shown; accepted_chars = accepted characters per opportunity; length = shown characters per shown suggestion.
    Keys: opportunities, shown, shown_rate, accepted, accept_rate, accept_rate_ci (by cluster), accepted_chars, length.
    """
    columns = {name: column.sum() for name, column in _columns(judged).items()}
    interval = rate(judged, "accept_rate")
    return {
        "opportunities": len(judged),
        "shown": int(columns["shown"]),
        "shown_rate": _over(columns["shown"], len(judged)),
        "accepted": int(columns["accepted"]),
        "accept_rate": _over(columns["accepted"], columns["shown"]),
        "accept_rate_ci": ends(interval),
        "accepted_chars": _over(columns["accepted_chars"], len(judged)),
        "length": _over(float(sum(one.shown_chars for one in judged)), columns["shown"]),
    }


def rate(judged: Sequence[Judged], metric: str, seed: int = 0) -> stats.Interval:
    """One metric (a name in METRICS) of one policy, with its 95 % interval by cluster bootstrap."""
    columns = _columns(judged)
    above, below = METRICS[metric]
    return stats.ratio(columns[above], columns[below], [one.cluster for one in judged], seed)


def change(before: Sequence[Judged], after: Sequence[Judged], seed: int = 0) -> dict[str, Any]:
    """Relative change of each metric from `before` to `after` on the same contexts, with 95 % intervals by cluster bootstrap (4000 draws).

    Keys: opportunities, clusters, and for each of shown, accept_rate, accepted_chars: `<name>_change` and `<name>_change_ci` ([low, high];
    an open end is None). A change that is not defined, e.g. of the accept rate when nothing was shown, is None.
    Raises GateError if the two do not hold the same contexts, each once.
    """
    first, second = paired(before, after)
    result: dict[str, Any] = {"opportunities": len(first), "clusters": len({one.cluster for one in first})}
    for metric in METRICS:
        interval = stats.relative_change(*_sides(first, second, metric), [one.cluster for one in first], seed)
        result[f"{metric}_change"] = _finite(interval.estimate)
        result[f"{metric}_change_ci"] = ends(interval)
    return result


def non_inferior(
    before: Sequence[Judged], after: Sequence[Judged], metric: str, margin: float, seed: int = 0, alpha: float = 0.05
) -> stats.NonInferiority:
    """Test that `after` lost less than `margin` of a metric (a name in METRICS), relatively. Raises GateError as `change` does."""
    first, second = paired(before, after)
    return stats.non_inferior(*_sides(first, second, metric), [one.cluster for one in first], margin, seed, alpha)


def paired(before: Sequence[Judged], after: Sequence[Judged]) -> tuple[list[Judged], list[Judged]]:
    """Both in the order of their context ids. Raises GateError if a context is missing on a side, twice, or in two clusters."""
    sides = [{one.context: one for one in side} for side in (before, after)]
    if len(sides[0]) != len(before) or len(sides[1]) != len(after):
        raise GateError("a context was judged twice under one policy: judge each context once, or give each draw its own context id")
    if sides[0].keys() != sides[1].keys():
        odd = min(sides[0].keys() ^ sides[1].keys())
        raise GateError(f"context {odd} was judged under one policy only: judge both policies on the same contexts")
    names = sorted(sides[0])
    if not names:
        raise GateError("no contexts were judged: cut more contexts for the gate")
    for name in names:
        if sides[0][name].cluster != sides[1][name].cluster:
            raise GateError(f"context {name} lies in cluster {sides[0][name].cluster} and in {sides[1][name].cluster}: name its file once")
    return [sides[0][name] for name in names], [sides[1][name] for name in names]


def ends(interval: stats.Interval) -> list[float | None]:
    """[low, high] as JSON can hold them: an infinite or undefined end is None."""
    return [_finite(interval.low), _finite(interval.high)]


def _columns(judged: Sequence[Judged]) -> dict[str, stats.Floats]:
    return {
        "opportunities": np.ones(len(judged)),
        "shown": np.array([one.shown for one in judged], dtype=np.float64),
        "accepted": np.array([one.shown and one.accepted for one in judged], dtype=np.float64),
        "accepted_chars": np.array([one.accepted_chars if one.shown else 0 for one in judged], dtype=np.float64),
    }


def _sides(
    before: Sequence[Judged], after: Sequence[Judged], metric: str
) -> tuple[tuple[stats.Floats, stats.Floats], tuple[stats.Floats, stats.Floats]]:
    above, below = METRICS[metric]
    first, second = _columns(before), _columns(after)
    return (first[above], first[below]), (second[above], second[below])


def _over(above: float, below: float) -> float | None:
    return float(above) / float(below) if below else None


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
