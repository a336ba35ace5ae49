"""The online canary: the candidate with a share of the users, before it gets all of them (P6).

The metric is reward per opportunity, averaged per user, then over users; users are the unit because they are assigned, and because one
person's opportunities resemble each other. Who is in which arm stays the same from cycle to cycle, so a lasting difference between the
people in the two arms would pass for an effect of the candidate: each user's mean is therefore corrected by what the same user had before
the canary (CUPED, Deng et al. 2013), as far as that predicts it.

Rule, at a look fixed beforehand by the number of opportunities in the canary arm, with d the difference of canary and incumbent:

    the arms' sizes are not those of the shares (p < 0.001)         roll back: the assignment is broken, no number means anything
    upper bound of the confidence sequence below 0                  roll back: harm
    d >= -max(margin * mean |reward|, one standard error)           promote
    neither, and it was the last look                               roll back
    neither                                                         extend

The interval is an asymptotic confidence sequence (Waudby-Smith et al. 2021), valid at every look together. A canary of a few users sees
only large harm; `detectable` says how large, in reward per opportunity.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from keepgrad import stats
from keepgrad.config import Release
from keepgrad.metrics import ends
from keepgrad.policy.traffic import assign
from keepgrad.records import GateVerdict, Generation, Score, Traffic

__all__ = ["assign", "decide", "of_canary", "user_means"]

_BROKEN_P = 0.001
_POWER = 0.8
_FEW = 5
"""Users of both arms with a past that a correction by it needs."""

Scored = tuple[Generation, Score]


class Difference(NamedTuple):
    """Canary minus incumbent, in reward per opportunity. `error` is the standard error, `interval` holds at all looks together."""

    canary: float
    incumbent: float
    error: float
    interval: stats.Interval
    theta: float
    """How much of a user's past was taken off: 0 none, 1 all of it."""


def of_canary(generation: Generation, traffic: Traffic) -> bool:
    """Whether it counts for the canary: served by its version to a user of its arm."""
    return generation.version == traffic.canary and assign(traffic, generation.user)[1] == "canary"


def user_means(scored: Sequence[Scored]) -> dict[str, float]:
    """Mean reward per opportunity of each user, over the rewarded generations."""
    rewards = defaultdict(list)
    for generation, score in scored:
        if score.place == "rewarded":
            rewards[generation.user].append(score.reward)
    return {user: sum(values) / len(values) for user, values in rewards.items()}


def decide(
    scored: Sequence[Scored],
    before: Mapping[str, float],
    traffic: Traffic,
    release: Release,
    look: int,
    id: str,
    at_ms: int,
) -> GateVerdict:
    """The verdict after the look-th look (from 0): pass, fail or extend.

    `scored`: all generations since the canary began, of any version; those of neither arm, and of conversations that began before it, are
    left out. `before`: mean reward of each user under the incumbent before that. The last look is the one at `release.canary_max`.
    """
    canary = [row for row in scored if of_canary(row[0], traffic)]
    incumbent = [row for row in scored if row[0].version == traffic.incumbent and assign(traffic, row[0].user)[1] == "incumbent"]
    arms = [user_means(canary), user_means(incumbent)]
    difference = _difference(arms[0], arms[1], before, release.alpha)
    margin, sizes_p = release.margin * _gross(incumbent), _sizes_p(scored, traffic)
    decision, why = _rule(difference, margin, sizes_p, len(canary), release)
    radius = (difference.interval.high - difference.interval.low) / 2
    detectable = radius + stats.z(_POWER) * difference.error
    low, high = ends(difference.interval)
    metrics = {
        "reward": {
            "candidate": difference.canary,
            "incumbent": difference.incumbent,
            "difference": difference.interval.estimate,
            "low": low,
            "high": high,
            "margin": margin,
            "passed": decision == "pass",
            "detectable": detectable if math.isfinite(detectable) else None,
        },
        "users": {"candidate": len(arms[0]), "incumbent": len(arms[1]), "sizes_p": sizes_p, "theta": difference.theta},
        "opportunities": {"candidate": len(canary), "incumbent": len(incumbent), "look": look},
    }
    sees = f"sees harm beyond {detectable:.3f} four times out of five" if math.isfinite(detectable) else "too few users to bound harm"
    numbers = (
        f"reward per opportunity {difference.interval.estimate:+.3f} (standard error {difference.error:.3f}, margin {margin:.3f}), "
        f"{len(arms[0])} against {len(arms[1])} users, {len(canary)} against {len(incumbent)} opportunities; {sees}"
    )
    return GateVerdict(
        id=id,
        stage="canary",
        candidate=traffic.canary,
        incumbent=traffic.incumbent,
        decision=decision,
        reason=f"{why}: {numbers}",
        metrics=metrics,
        contexts=len(canary),
        at_ms=at_ms,
    )


def _rule(
    difference: Difference, margin: float, sizes_p: float, opportunities: int, release: Release
) -> tuple[Literal["pass", "fail", "extend"], str]:
    if sizes_p < _BROKEN_P:
        return "fail", f"the arms do not have the sizes of their shares (p = {sizes_p:.1g}), so users were not assigned as stated"
    if difference.interval.high < 0:
        return "fail", "harm, the whole interval lies below zero"
    if opportunities < release.canary_min:
        return "extend", f"{opportunities} of {release.canary_min} opportunities"
    if difference.interval.estimate >= -max(margin, difference.error):
        return "pass", "not worse than the incumbent by more than the margin or one standard error"
    return ("fail" if opportunities >= release.canary_max else "extend"), "worse than the margin and one standard error allow"


def _difference(canary: Mapping[str, float], incumbent: Mapping[str, float], before: Mapping[str, float], alpha: float) -> Difference:
    """Means over users, each corrected by theta (past - mean past); theta is the slope of now on past within the arms, kept in [0, 1]."""
    known = {user for user in (*canary, *incumbent) if user in before}
    usual = sum(before[user] for user in known) / len(known) if known else 0.0
    theta = _slope([[(before[user], arm[user]) for user in arm if user in before] for arm in (canary, incumbent)])
    sides = [np.array([arm[user] - theta * (before.get(user, usual) - usual) for user in arm]) for arm in (canary, incumbent)]
    if not all(len(side) for side in sides):
        return Difference(0.0, 0.0, math.inf, stats.Interval(0.0, -math.inf, math.inf), theta)
    error = math.sqrt(sum(side.var(ddof=1) / len(side) if len(side) > 1 else math.inf for side in sides))
    interval = stats.mean_difference(sides[1], sides[0], alpha, tuned_for=max(len(before), 2))
    return Difference(float(sides[0].mean()), float(sides[1].mean()), error, interval, theta)


def _slope(arms: Sequence[Sequence[tuple[float, float]]]) -> float:
    shared = spread = 0.0
    if sum(len(arm) for arm in arms) < _FEW:
        return 0.0
    for arm in arms:
        if len(arm) > 1:
            past, now = np.array(arm).T
            shared += float(((past - past.mean()) * (now - now.mean())).sum())
            spread += float(((past - past.mean()) ** 2).sum())
    return min(max(shared / spread, 0.0), 1.0) if spread > 0 else 0.0


def _gross(scored: Sequence[Scored]) -> float:
    """Mean |reward| per opportunity: what a relative margin is relative to, as the mean reward may be zero."""
    rewards = [abs(score.reward) for _, score in scored if score.place == "rewarded"]
    return sum(rewards) / len(rewards) if rewards else 0.0


def _sizes_p(scored: Sequence[Scored], traffic: Traffic) -> float:
    """p of a sample-ratio test: did the users that were served the canary come in its share of all who were not held back?

    Counts what was served, not what `assign` says, so a gateway that assigns otherwise is found out. Users count once, as canary if ever.
    """
    served = {generation.user for generation, _ in scored if generation.version == traffic.canary}
    others = {generation.user for generation, _ in scored if generation.version == traffic.incumbent} - served
    rest = 1 - traffic.holdback_share - traffic.canary_share
    if rest <= 0 or traffic.canary_share <= 0:
        return 1.0
    return stats.sample_ratio([len(served), len(others)], [traffic.canary_share, rest])
