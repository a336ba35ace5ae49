"""The offline gate: candidate against incumbent on the same contexts and seeds, before the candidate gets any traffic (P6).

Three metrics, each as a relative change of candidate over incumbent, paired by context and resampled by file:

    accepted_chars   characters accepted per opportunity
    accept_rate      accepted over shown
    reward           1 - tau accepted, -tau shown in vain, 0 silent, per opportunity; relative to the incumbent's mean |reward|, because
                     the mean itself may be zero

Rule for each metric, with d its estimated change, m the margin, and bounds that hold for all metrics together (Holm):

    proven      lower bound above -m                    pass: not worse by more than the margin
    harmful     upper bound below 0 and not proven      fail
    undecided   neither: too few contexts to say        pass if d >= -m
    undefined   the candidate has nothing to divide by  fail

With many contexts this is the usual test of non-inferiority. With few, where that test would reject everybody, the point estimate
decides, so both errors are real: `detectable` is the loss that the gate would have stopped four times out of five.

Each verdict rests on two plants judged by the same code in the same run: the candidate's drafts moved to other contexts must fail, and
the incumbent against itself must pass. A gate that gets one of them wrong raises GateError.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from keepgrad import stats
from keepgrad.config import Release
from keepgrad.errors import GateError
from keepgrad.metrics import Judged, ends, paired
from keepgrad.records import Draft, GateVerdict
from keepgrad.release.suite import Context
from keepgrad.words import ends_word

METRICS = ("accepted_chars", "accept_rate", "reward")
_MIN_PART = 4
"""Fewest characters of a part of the line that a developer would take."""
_POWER = 0.8
_WIDTH = 6
"""Columns of one side in the sums that are resampled."""


class Effect(msgspec.Struct, frozen=True):
    """One metric of one comparison. Made by `compare`, eaten by the verdict, the report and the tests.

    >>> Effect(candidate=1.9, incumbent=2.0, difference=-0.05, low=-0.14, high=0.05, margin=0.1, state="undecided", passed=True,
    ...        detectable=0.14)
    """

    candidate: float
    incumbent: float
    difference: float
    """Relative change."""
    low: float | None
    high: float | None
    """Two-sided interval of `difference` at 1 - alpha; None where it is open."""
    margin: float
    state: str
    """proven | harmful | undecided | undefined"""
    passed: bool
    detectable: float | None
    """Smallest relative loss that the gate would have stopped with 80 % power; None where undefined."""


def judge(drafts: Sequence[Draft], contexts: Sequence[Context]) -> list[Judged]:
    """What a developer who wants exactly `truth` could use of each draft. Raises GateError if the two do not pair up."""
    if len(drafts) != len(contexts):
        raise GateError(f"{len(drafts)} drafts for {len(contexts)} gate contexts: each context needs one draft of each version")
    judged = []
    for draft, context in zip(drafts, contexts, strict=True):
        shown = draft.verdict == "show" and bool(draft.text.strip())
        text = draft.text.rstrip()
        accepted = shown and usable(text, context.truth)
        judged.append(
            Judged(
                context=context.id,
                cluster=context.file,
                shown=shown,
                accepted=accepted,
                accepted_chars=len(text) if accepted else 0,
                shown_chars=len(text) if shown else 0,
            )
        )
    return judged


def usable(text: str, truth: str) -> bool:
    """Whether `text` is the rest of the line, or its start: 4 characters or more that end where a word ends. Trailing blanks aside."""
    text, truth = text.rstrip(), truth.rstrip()
    if not text or not truth.startswith(text):
        return False
    if text == truth:
        return True
    return len(text) >= _MIN_PART and ends_word(truth, len(text))


def gate(
    contexts: Sequence[Context],
    drafts: Mapping[str, Sequence[Draft]],
    candidate: str,
    incumbent: str,
    release: Release,
    tau: float,
    seed: int,
    id: str,
    at_ms: int,
) -> GateVerdict:
    """The verdict on `candidate`, pass or fail, from `drafts` by version in the order of `contexts`.

    Raises GateError with fewer than `release.gate_min_contexts` contexts, or when a plant shows that the gate cannot tell good from bad.
    """
    if len(contexts) < release.gate_min_contexts:
        raise GateError(
            f"the gate has {len(contexts)} contexts and needs {release.gate_min_contexts} (release.gate_min_contexts): "
            "cut more with `keepgrad suite`, or lower the key"
        )
    before, after = judge(drafts[incumbent], contexts), judge(drafts[candidate], contexts)
    bad = judge(_moved(drafts[candidate], contexts), contexts)
    _check_plants(compare(before, bad, release, tau, seed), compare(before, before, release, tau, seed))
    effects = compare(before, after, release, tau, seed)
    failed = [name for name, effect in effects.items() if not effect.passed]
    return GateVerdict(
        id=id,
        stage="gate",
        candidate=candidate,
        incumbent=incumbent,
        decision="fail" if failed else "pass",
        reason=_reason(effects, failed, len(contexts)),
        metrics={name: msgspec.to_builtins(effect) for name, effect in effects.items()} | {"shown": _shown(before, after)},
        contexts=len(contexts),
        at_ms=at_ms,
    )


def compare(before: Sequence[Judged], after: Sequence[Judged], release: Release, tau: float, seed: int) -> dict[str, Effect]:
    """Each metric's effect of `after` over `before`, paired by context. Raises GateError if `before` has nothing accepted."""
    if not any(judged.accepted for judged in before):
        raise GateError(
            f"the incumbent has nothing accepted in {len(before)} gate contexts, so no change of it can be seen: "
            "cut contexts that it can answer, or more of them, with `keepgrad suite`"
        )
    first, second = paired(before, after)
    sums = stats.cluster_sums(np.hstack([_columns(first, tau), _columns(second, tau)]), [judged.cluster for judged in first])
    draws = _changes(stats.cluster_resample(sums, seed=seed))
    # An undefined draw counts as a loss where a loss is to be refuted, and not as harm where harm is to be shown.
    proven = stats.holm({name: _share(~(draws[:, i] > -release.margin)) for i, name in enumerate(METRICS)}, release.alpha)
    harmful = stats.holm({name: _share(~(draws[:, i] < 0)) for i, name in enumerate(METRICS)}, release.alpha)
    total = sums.sum(0)
    levels, changes = [_levels(total[:_WIDTH]), _levels(total[_WIDTH:])], _changes(total)
    effects = {}
    for i, name in enumerate(METRICS):
        change = float(changes[i])
        state = "undefined" if math.isnan(change) else "proven" if proven[name] else "harmful" if harmful[name] else "undecided"
        low, high = ends(stats.percentile_interval(change, draws[:, i], 1 - release.alpha))
        effects[name] = Effect(
            candidate=float(np.nan_to_num(levels[1][i])),
            incumbent=float(np.nan_to_num(levels[0][i])),
            difference=-1.0 if state == "undefined" else change,
            low=low,
            high=high,
            margin=release.margin,
            state=state,
            passed=state == "proven" or (state == "undecided" and change >= -release.margin),
            detectable=None if state == "undefined" else _detectable(float(np.nanstd(draws[:, i])), release),
        )
    return effects


def _columns(judged: Sequence[Judged], tau: float) -> stats.Floats:
    """Shape (N, 6): accepted characters, 1, accepted, shown, reward, |reward|."""
    rows = []
    for one in judged:
        reward = 0.0 if not one.shown else 1 - tau if one.accepted else -tau
        rows.append((one.accepted_chars, 1, one.accepted, one.shown, reward, abs(reward)))
    return np.array(rows, dtype=np.float64)


def _levels(total: stats.Floats) -> stats.Floats:
    """Shape (..., 3): the metrics of one side, from its sums (..., 6)."""
    return np.stack([_over(total[..., 0], total[..., 1]), _over(total[..., 2], total[..., 3]), _over(total[..., 4], total[..., 1])], -1)


def _changes(total: stats.Floats) -> stats.Floats:
    """Shape (..., 3): the relative change in each metric, from sums (..., 12) of incumbent and candidate; nan where undefined."""
    before, after = _levels(total[..., :_WIDTH]), _levels(total[..., _WIDTH:])
    scale = before.copy()
    scale[..., 2] = _over(total[..., 5], total[..., 1])
    return _over(after - before, scale)


def _over(above: stats.Floats, below: stats.Floats) -> stats.Floats:
    result = np.full(np.shape(above), np.nan)
    np.divide(above, below, out=result, where=np.asarray(below) != 0)
    return result


def _share(hits: npt.NDArray[np.bool_]) -> float:
    """Bootstrap p with one added to both counts, so that it is never 0 (Davison and Hinkley 1997, section 4.2)."""
    return float((1 + np.count_nonzero(hits)) / (1 + hits.size))


def _detectable(error: float, release: Release) -> float:
    """A loss beyond the margin fails, as does a smaller one that is surely harm; 0.84 standard errors further is power 0.8."""
    return min(release.margin, stats.z(1 - release.alpha / len(METRICS)) * error) + stats.z(_POWER) * error


def _moved(drafts: Sequence[Draft], contexts: Sequence[Context]) -> list[Draft]:
    """The same drafts, each at a context of another file: as good as the candidate in style and length, useless in content."""
    by_file = sorted(range(len(contexts)), key=lambda at: contexts[at].file)
    most = max(sum(context.file == file for context in contexts) for file in {context.file for context in contexts})
    moved = list(drafts)
    for position, at in enumerate(by_file):
        moved[at] = drafts[by_file[(position + max(most, len(contexts) // 2)) % len(contexts)]]
    return moved


def _check_plants(bad: Mapping[str, Effect], same: Mapping[str, Effect]) -> None:
    if all(effect.passed for effect in bad.values()):
        raise GateError(
            "the gate let a planted bad version pass (drafts moved to other contexts), so its verdict is worth nothing: "
            "use more contexts (release.gate_contexts) or cut better ones with `keepgrad suite`"
        )
    wrong = [name for name, effect in same.items() if not effect.passed]
    if wrong:
        raise GateError(
            f"the gate failed the incumbent against itself on {', '.join(wrong)}: this is a fault of keepgrad, please report it"
        )


def _shown(before: Sequence[Judged], after: Sequence[Judged]) -> dict[str, Any]:
    """How much is shown: reported, not judged, since silence is an allowed answer."""
    candidate, incumbent = (sum(judged.shown for judged in side) / len(side) for side in (after, before))
    return {"candidate": candidate, "incumbent": incumbent, "difference": candidate / incumbent - 1 if incumbent else None}


def _reason(effects: Mapping[str, Effect], failed: Sequence[str], contexts: int) -> str:
    def say(name: str) -> str:
        effect = effects[name]
        low, high = (f"{end:+.1%}" if end is not None else "open" for end in (effect.low, effect.high))
        return f"{name} {effect.difference:+.1%} [{low}, {high}] ({effect.state})"

    margin, least = next(iter(effects.values())).margin, max(effect.detectable or 0.0 for effect in effects.values())
    head = f"worse than the margin of {margin:.0%} allows: " if failed else f"within the margin of {margin:.0%}: "
    tail = f"; {contexts} contexts stop a loss of {least:.0%} four times out of five"
    return head + ", ".join(say(name) for name in (failed or effects)) + tail
