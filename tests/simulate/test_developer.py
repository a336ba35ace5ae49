"""The developer's judgement: what is right is taken, what is wrong is not, and the same opportunity has the same luck."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepgrad.simulate.developer import HORIZONS_S, Decision, Draws, decide, distance, fit_of, temperament

LINES = st.text("abc_ (),.=:", min_size=1, max_size=30)


def many(text: str, truth: str, count: int = 2000) -> tuple[Counter[str], list[Decision]]:
    made = []
    for n in range(count):
        name = f"dev-{n % 40}"
        made.append(decide(text, truth, temperament(0, name), Draws(0, name, n)))
    return Counter(decision.end for decision in made), made


@pytest.mark.parametrize(
    ("text", "truth", "fit", "usable"),
    [
        ("self.total += 1", "self.total += 1", "whole", 15),
        ("self.total += 1 ", "self.total += 1\nreturn", "whole", 16),
        ("self.total", "self.total += 1", "start", 10),
        ("self.tot", "self.total += 1", "wrong", 5),
        ("foo(a, c)", "foo(a, b)", "near", 7),
        ("return None", "yield x", "wrong", 0),
        ("   ", "x = 1", "wrong", 0),
        ("x", "", "wrong", 0),
    ],
)
def test_fit(text: str, truth: str, fit: str, usable: int) -> None:
    assert fit_of(text, truth.split("\n")[0]) == (fit, usable)


def test_right_lines_are_mostly_accepted_and_sometimes_typed_out() -> None:
    ends, _ = many("self.assertEqual(left, right)", "self.assertEqual(left, right)\n")
    assert ends["accepted"] / 2000 > 0.85
    assert 0.01 < ends["typed_through"] / 2000 < 0.08


def test_right_starts_are_worth_a_little_less_than_whole_lines() -> None:
    whole, _ = many("self.assertEqual(left, right)", "self.assertEqual(left, right)")
    start, _ = many("self.assertEqual(left, ", "self.assertEqual(left, right)")
    assert 0.7 * whole["accepted"] < start["accepted"] < whole["accepted"]


def test_tiny_right_suggestions_are_typed_out_or_ignored() -> None:
    ends, _ = many("):", "):")
    assert ends["accepted"] / 2000 < 0.2
    assert ends["typed_through"] > ends["accepted"] and ends["ignored"] > ends["accepted"]


def test_wrong_suggestions_are_refused_in_different_ways() -> None:
    ends, decisions = many("raise ValueError(name)", "yield from self.items()")
    assert (ends["rejected"] + ends["ignored"]) / 2000 > 0.95
    assert ends["rejected"] > 300
    assert {d.reason for d in decisions if d.end == "ignored"} == {"typing_disagreed", "superseded", "expired"}
    assert all(d.undone and d.survival[600] == 1.0 for d in decisions if d.end == "accepted")


def test_nearly_right_suggestions_are_taken_in_part_or_corrected() -> None:
    ends, decisions = many("result = compute(first, third)", "result = compute(first, second)")
    assert ends["partial"] > 100 and ends["accepted"] > 100 and ends["rejected"] > 100
    assert {d.chars for d in decisions if d.end == "partial"} == {24}
    assert all(d.survival[600] > 0 for d in decisions if d.end == "accepted")


def test_most_accepted_text_stays_and_less_of_it_as_time_goes() -> None:
    _, decisions = many("self.assertEqual(left, right)", "self.assertEqual(left, right)")
    survivals = [d.survival for d in decisions if d.survival]
    means = [sum(s[at] for s in survivals) / len(survivals) for at in HORIZONS_S]
    assert means == sorted(means) and 0.02 < means[0] < means[-1] < 0.2
    assert sum(s[600] == 0 for s in survivals) / len(survivals) > 0.5


def test_developers_differ() -> None:
    spread = {temperament(0, f"dev-{n}") for n in range(20)}
    assert len(spread) == 20
    assert temperament(0, "dev-1") == temperament(0, "dev-1") != temperament(1, "dev-1")


def test_an_empty_suggestion_is_an_error() -> None:
    with pytest.raises(ValueError, match="never shown"):
        decide("", "x", temperament(0, "a"), Draws(0, "a", 0))


@given(LINES, LINES, st.integers(0, 50))
def test_decide_is_pure_and_sound(text: str, truth: str, seed: int) -> None:
    who = temperament(seed, "dev")
    decision = decide(text, truth, who, Draws(seed, "dev", "place"))
    assert decision == decide(text, truth, who, Draws(seed, "dev", "place"))
    assert decision.taken == (decision.chars > 0) and 0 <= decision.chars <= len(text)
    assert bool(decision.survival) == (decision.end in ("accepted", "partial"))
    assert all(0 <= decision.survival[at] <= 1 for at in decision.survival)
    assert (decision.reason != "") == (decision.end == "ignored") and decision.after_s > 0
    if decision.end == "partial":
        assert truth.startswith(text[: decision.chars])


@given(LINES, LINES, st.integers(0, 200))
def test_under_the_same_luck_the_right_line_is_taken_wherever_another_of_its_length_was(text: str, truth: str, place: int) -> None:
    if len(truth.strip()) < 12 or not truth.strip():
        return
    who, draws = temperament(0, "dev"), Draws(0, "dev", place)
    if decide(text, truth, who, draws).taken:
        assert decide(truth, truth, who, draws).taken


@given(st.text("ab", max_size=8), st.text("ab", max_size=8))
def test_distance_is_a_metric_bounded_by_length(a: str, b: str) -> None:
    assert distance(a, b) == distance(b, a) and abs(len(a) - len(b)) <= distance(a, b) <= max(len(a), len(b))
    assert (distance(a, b) == 0) == (a == b)
