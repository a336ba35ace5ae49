"""Tab: what one generation amounts to at a moment of its user's clock, as a pure function of its events (design section 5).

    abstained                                   the policy was silent: known at once
    accepted > typed_through > partial          what the developer took; the strongest event counts, however late and in whatever order
    > rejected > ignored                        drawn, nothing taken
    not_drawn                                   cancelled or lost a race: no feedback about it exists
    ""                                          not known yet, or never: the editor closed

More events can only make an outcome stronger in that order, never weaker, and so can a later clock: the audit relies on it to find an event
that has been taken away. Order of arrival never matters; duplicates (same id) count once.

An outcome is `observed` once its end is known and its region has settled, the editor closed, or SETTLE_MS of the user's clock have passed
since it was drawn; a drawn suggestion without an end by then was ignored (expired). What was not drawn within SETTLE_MS, or whose editor
closed before anything was done with it, is censored (closed). All of that is the developer's and the editor's doing: see REASONS.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from keepgrad.records import Event, Generation, Outcome, Place

SETTLE_MS = 300_000
"""A suggestion settles when its region has been quiet for 10 s (the client says so), or this long after it was drawn."""


class Reason(msgspec.Struct, frozen=True):
    """Why a generation lies where it lies in the books (P1), and whether the policy itself could have brought it about.

    >>> Reason(place="censored", policy_controllable=False, strength=1, why="the editor closed before anything was done with it")
    """

    place: Place
    policy_controllable: bool
    """True: vanishing this way would be a choice of the policy, so it gets a reward and is never excluded or censored."""
    strength: int
    """How strong the evidence for it is: more events or a later clock never lead to a reason of less strength."""
    why: str


REASONS: dict[str, Reason] = {
    "waiting": Reason("pending", False, 0, "nothing seen of it yet, and its 5 minutes are not over"),
    "unsettled": Reason("pending", False, 1, "drawn, and neither settled nor its 5 minutes over"),
    "closed": Reason("censored", False, 1, "the editor closed, or its user went on, before anything was done with it"),
    "expired": Reason("rewarded", True, 1, "ignored: nothing was done with it in 5 minutes"),
    "not_drawn": Reason("excluded", False, 2, "cancelled by the developer's typing, or lost a race: nobody saw it"),
    "ignored": Reason("rewarded", True, 3, "ignored, the client does not say how"),
    "superseded": Reason("rewarded", True, 4, "ignored: another suggestion took its place"),
    "typing_disagreed": Reason("rewarded", True, 5, "ignored: the developer typed something else"),
    "rejected": Reason("rewarded", True, 6, "explicitly dismissed"),
    "partial": Reason("rewarded", True, 7, "taken in part"),
    "typed_through": Reason("rewarded", True, 8, "typed out by the developer: taken whole"),
    "accepted": Reason("rewarded", True, 9, "taken whole"),
    "abstained": Reason("rewarded", True, 10, "the policy was silent, or had nothing to show"),
    "truncated": Reason("rewarded", True, 10, "the draft hit the token limit"),
    "unparsable": Reason("rewarded", True, 10, "the output was not in the form asked for"),
    "invalid_call": Reason("rewarded", True, 10, "the policy's own tool call was wrong"),
    "no_edit": Reason("rewarded", True, 10, "the policy answered without an edit"),
    "asked": Reason("rewarded", True, 10, "the policy asked instead of editing"),
    "consent": Reason("excluded", False, 10, "the key's consent is metadata: nothing may be learned from it"),
}
"""Every reason there is, in one place. The audit fails on any other, and on a policy-controllable one that excludes or censors.

`unsettled`, `closed` and `expired` are equally strong: a late `closed` turns the third into the second, a late `shown` the second into the
first.
"""

_IGNORED = ("typing_disagreed", "superseded", "ignored", "expired")
"""Kinds of `ignored`, the strongest first."""
_DRAWN = ("shown", "accepted", "typed_through", "partial", "rejected", "ignored", "settled")
"""Events that happen to drawn suggestions only: each proves that it was drawn, also where `shown` was lost."""


def outcome(generation: Generation, events: Iterable[Event], now_ms: int) -> Outcome:
    """The outcome of one generation from its events (any order, duplicates allowed; those of others are left out).

    `now_ms` is the latest known time of that user's own clock. Pure: the same arguments give the same outcome.
    """
    mine = {event.id: event for event in events if event.generation == generation.id}
    seen = sorted(mine.values(), key=lambda event: (event.at_ms, event.id))
    if abstains(generation):
        return Outcome(generation.id, "observed", "abstained", "abstained", 0, 0, "", events=len(seen))
    kinds = {event.kind for event in seen}
    end, chars = _end(generation, seen)
    drawn = [event.at_ms for event in seen if event.kind in _DRAWN]
    over = "closed" in kinds or (bool(drawn) and now_ms - drawn[0] >= SETTLE_MS)
    if end and (over or "settled" in kinds):
        return _outcome(generation, end, _ignored(seen) if end == "ignored" else end, seen, chars)
    if "not_drawn" in kinds:
        return _outcome(generation, "not_drawn", "not_drawn", seen)
    if drawn and over and ("closed" not in kinds or "settled" in kinds):
        return _outcome(generation, "ignored", "expired", seen)
    if "closed" in kinds or (not drawn and now_ms - generation.client_ms > SETTLE_MS):
        return _unknown(generation, "censored", "closed", seen)
    return _unknown(generation, "pending", "unsettled" if drawn else "waiting", seen)


def abstains(generation: Generation) -> bool:
    """Whether there was nothing to draw: the verdict was silence, or the draft was empty (we know its text at consent `code` only)."""
    return generation.verdict == "silent" or (generation.consent == "code" and not generation.text)


def _end(generation: Generation, seen: Sequence[Event]) -> tuple[str, int]:
    """The strongest end and the characters taken. `partial` is cumulative (as in LSP), so the largest counts; all of it is `accepted`."""
    kinds = {event.kind for event in seen}
    length = len(generation.text)
    part = max((event.chars for event in seen if event.kind == "partial"), default=0)
    if "accepted" in kinds or (length and part >= length):
        return "accepted", length
    if "typed_through" in kinds:
        return "typed_through", length
    if part > 0:
        return "partial", part
    return ("rejected" if "rejected" in kinds else "ignored" if kinds & {"ignored", "partial"} else ""), 0


def _ignored(seen: Sequence[Event]) -> str:
    given = {event.reason if event.reason in _IGNORED else "ignored" for event in seen if event.kind == "ignored"}
    return next((reason for reason in _IGNORED if reason in given), "ignored")


def _settled_text(seen: Sequence[Event]) -> str:
    """First line of what stood in the region when it settled; the latest word on it counts."""
    texts = [event.text for event in seen if event.kind == "settled"]
    return texts[-1].split("\n", 1)[0].rstrip("\r") if texts else ""


def _outcome(generation: Generation, end: str, reason: str, seen: Sequence[Event], chars: int = 0) -> Outcome:
    shown = 0 if end == "not_drawn" else len(generation.text)
    survival = {event.horizon_s: event.chars / 1000 for event in seen if event.kind == "survival"}
    return Outcome(generation.id, "observed", end, reason, min(chars, shown), shown, _settled_text(seen), survival, len(seen))


def _unknown(generation: Generation, state: Literal["pending", "censored"], reason: str, seen: Sequence[Event]) -> Outcome:
    base = _outcome(generation, "", reason, seen)
    return msgspec.structs.replace(base, state=state)
