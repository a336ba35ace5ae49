"""Every way a Tab suggestion can end, and the two things the audit relies on: order does not matter, and evidence never gets weaker."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepgrad.outcomes.episode import REASONS, SETTLE_MS, outcome
from keepgrad.records import Event, Generation, Outcome, Sampling

T0 = 1_764_400_000_000
MINUTE = 60_000
SERVED = Generation(
    id="g-1", kind="tab", org="acme", user="u-1", key="k-1", conversation="c-1", version="v-1", arm="incumbent", consent="code", seed=7,
    sampling=Sampling(), prompt_tokens=9, completion_tokens=3, verdict="show", verdict_logprob=-0.1, show_probability=0.9, finish="stop",
    text="a + b", path="a.py", client_ms=T0, created_ms=T0, latency_ms=80.0,
)  # fmt: skip
SILENT = msgspec.structs.replace(SERVED, verdict="silent")
EMPTY = msgspec.structs.replace(SERVED, text="")
_numbers = itertools.count()


def event(kind: str, after_ms: int = 1000, **more: Any) -> Event:
    return msgspec.convert({"id": f"e-{next(_numbers)}", "generation": "g-1", "kind": kind, "at_ms": T0 + after_ms, **more}, Event)


def at(events: list[Event], minutes: float, generation: Generation = SERVED) -> Outcome:
    return outcome(generation, events, T0 + int(minutes * MINUTE))


SHOWN = event("shown", 300)
QUIET = event("settled", 12_000, reason="quiet", text="a + b")


@pytest.mark.parametrize(
    ("events", "end", "reason", "taken"),
    [
        ([event("accepted")], "accepted", "accepted", 5),
        ([event("typed_through")], "typed_through", "typed_through", 5),
        ([event("partial", chars=3)], "partial", "partial", 3),
        ([event("partial", chars=5)], "accepted", "accepted", 5),
        ([event("partial", chars=99)], "accepted", "accepted", 5),
        ([event("partial", chars=1), event("partial", chars=3)], "partial", "partial", 3),
        ([event("partial", chars=2), event("rejected", 2000)], "partial", "partial", 2),
        ([event("partial", chars=2), event("accepted", 2000)], "accepted", "accepted", 5),
        ([event("partial", chars=0)], "ignored", "ignored", 0),
        ([event("rejected")], "rejected", "rejected", 0),
        ([event("ignored", reason="superseded")], "ignored", "superseded", 0),
        ([event("ignored", reason="typing_disagreed")], "ignored", "typing_disagreed", 0),
        ([event("ignored", reason="expired")], "ignored", "expired", 0),
        ([event("ignored", reason="who knows")], "ignored", "ignored", 0),
        ([event("ignored", reason="superseded"), event("accepted", 90_000)], "accepted", "accepted", 5),  # a late accept arrives twice
        ([event("accepted", 2000), event("rejected", 3000)], "accepted", "accepted", 5),
        ([], "ignored", "expired", 0),
    ],
)  # fmt: skip
def test_ends(events: list[Event], end: str, reason: str, taken: int) -> None:
    found = at([SHOWN, *events, QUIET], 6)
    assert (found.state, found.end, found.reason, found.accepted_chars, found.shown_chars) == ("observed", end, reason, taken, 5)
    assert REASONS[found.reason].place == "rewarded"


def test_silence_is_known_at_once_whatever_a_client_says_of_it() -> None:
    for generation in (SILENT, EMPTY):
        for events in ([], [event("shown"), event("accepted")], [event("closed")], [event("not_drawn")]):
            found = at(events, 0, generation)
            assert (found.state, found.end, found.reason) == ("observed", "abstained", "abstained")
            assert (found.accepted_chars, found.shown_chars, found.settled_text, found.events) == (0, 0, "", len(events))


def test_an_end_waits_for_its_region_to_settle_or_five_minutes() -> None:
    assert at([SHOWN, event("accepted")], 1).state == "pending"
    assert at([SHOWN, event("accepted")], 1).reason == "unsettled"
    assert at([SHOWN, event("accepted"), QUIET], 1).end == "accepted"
    assert at([SHOWN, event("accepted")], 5.1).end == "accepted"
    assert outcome(SERVED, [SHOWN], SHOWN.at_ms + SETTLE_MS - 1).state == "pending"
    assert outcome(SERVED, [SHOWN], SHOWN.at_ms + SETTLE_MS).reason == "expired"


def test_closing_hides_nothing_that_was_done_before() -> None:
    closed = event("closed", 2000, reason="closed")
    assert at([SHOWN, event("accepted"), closed], 0.1).end == "accepted"
    assert at([SHOWN, event("rejected"), closed], 0.1).end == "rejected"
    assert (at([SHOWN, closed], 9).state, at([SHOWN, closed], 9).reason) == ("censored", "closed")
    assert at([closed], 0).state == "censored"
    assert at([SHOWN, QUIET, closed], 0.5).reason == "expired"  # they went on writing before they closed: it was seen and left


def test_never_drawn() -> None:
    assert (at([event("not_drawn")], 0.1).end, at([event("not_drawn")], 9).end) == ("not_drawn", "not_drawn")
    assert at([], 4.9).reason == "waiting"
    assert (at([], 5.1).state, at([], 5.1).reason) == ("censored", "closed")
    assert at([event("not_drawn"), event("accepted"), QUIET], 1).end == "accepted"
    for minutes in (0.1, 9):  # a client that says both, and no end: the clock running out makes it no failure of the suggestion
        assert at([SHOWN, event("not_drawn")], minutes).end == "not_drawn"


def test_a_lost_shown_event_is_made_good_by_what_proves_it() -> None:
    assert at([event("accepted"), QUIET], 1).end == "accepted"
    assert at([event("rejected")], 6).end == "rejected"
    assert at([QUIET], 6).reason == "expired"


def test_settled_text_is_the_last_first_line_and_survival_is_kept() -> None:
    events = [SHOWN, event("accepted"), event("settled", 20_000, text="a + b  # sum\nreturn"), event("settled", 12_000, text="a")]
    events += [event("survival", 30_000, chars=0, horizon_s=30), event("survival", 600_000, chars=250, horizon_s=600)]
    found = at(events, 6)
    assert found.settled_text == "a + b  # sum" and found.survival == {30: 0.0, 600: 0.25} and found.events == 6


def test_events_of_other_generations_and_duplicates_count_nothing() -> None:
    other = msgspec.structs.replace(event("accepted"), generation="g-2")
    assert at([SHOWN, other, QUIET], 6).reason == "expired"
    assert at([SHOWN, SHOWN, QUIET, QUIET], 6) == at([SHOWN, QUIET], 6)


_event = st.builds(
    lambda kind, after_s, chars, reason: event(kind, after_s * 1000, chars=chars, reason=reason),
    st.sampled_from(["shown", "accepted", "partial", "typed_through", "rejected", "ignored", "not_drawn", "settled", "survival", "closed"]),
    st.integers(0, 700),
    st.integers(0, 7),
    st.sampled_from(["", "superseded", "typing_disagreed", "expired"]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_event, max_size=6), st.integers(0, 900), st.randoms(use_true_random=False), st.sampled_from([SERVED, SILENT]))
def test_order_and_duplicates_never_matter(events: list[Event], now_s: int, random: Any, generation: Generation) -> None:
    again = events + events[:2]
    random.shuffle(again)
    now_ms = T0 + now_s * 1000
    assert outcome(generation, again, now_ms) == outcome(generation, events, now_ms)
    assert outcome(generation, events, now_ms).reason in REASONS


@settings(max_examples=500, deadline=None)
@given(st.lists(_event, max_size=5), st.lists(_event, max_size=2), st.integers(0, 900), st.integers(0, 900))
def test_more_events_and_a_later_clock_never_weaken_an_outcome(events: list[Event], more: list[Event], now_s: int, later_s: int) -> None:
    before = outcome(SERVED, events, T0 + now_s * 1000)
    after = outcome(SERVED, events + more, T0 + (now_s + later_s) * 1000)
    assert REASONS[after.reason].strength >= REASONS[before.reason].strength
    assert after.accepted_chars >= before.accepted_chars
    assert after.events == before.events + len(more)


@settings(max_examples=300, deadline=None)
@given(st.lists(_event, max_size=6))
def test_nothing_is_pending_for_ever(events: list[Event]) -> None:
    assert outcome(SERVED, events, 2**62).state != "pending"


def test_every_reason_lies_in_one_place_and_vanishing_is_never_the_policys_choice() -> None:
    for reason in REASONS.values():
        assert not (reason.policy_controllable and reason.place in ("censored", "excluded"))
        assert reason.why and reason.place in ("rewarded", "pending", "censored", "excluded")
