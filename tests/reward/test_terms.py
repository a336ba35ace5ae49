"""The reward by hand, and what its shape promises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepgrad.reward import terms
from keepgrad.reward.spec import load
from tests.reward.make import generation, reward, scored

SPEC = load()
TYPICAL = "x" * 30


def test_the_four_rewards_of_a_typical_suggestion() -> None:
    assert reward(TYPICAL, "accepted", SPEC) == pytest.approx(0.75)
    assert reward(TYPICAL, "typed_through", SPEC) == pytest.approx(0.75)
    assert reward(TYPICAL, "rejected", SPEC) == pytest.approx(-0.25)
    assert reward(TYPICAL, "ignored", SPEC) == pytest.approx(-0.25)
    assert reward(TYPICAL, "abstained", SPEC) == 0.0


def test_partial_pays_by_the_share_taken_and_its_own_size() -> None:
    text = "x" * 60
    assert reward(text, "partial", SPEC, chars=30) == pytest.approx(0.5 * 1.0 - 0.25)
    assert reward(text, "partial", SPEC, chars=60) == pytest.approx(reward(text, "accepted", SPEC))
    assert reward(text, "partial", SPEC, chars=1) < 0
    assert reward(text, "partial", SPEC, chars=0) == pytest.approx(-0.25)


def test_terms_are_kept_apart_and_add_up() -> None:
    found = scored(generation("g", "x" * 3), "accepted", SPEC)[3]
    assert found.terms == pytest.approx({"accept": 0.75, "size": 6 / 33 - 1})
    assert found.reward == sum(found.terms.values()) and found.spec == SPEC.hash


@pytest.mark.parametrize(("size", "threshold"), [(6, 0.75), (12, 0.4375), (30, 0.25), (60, 0.1875)])
def test_showing_pays_from_the_acceptance_that_the_spec_says(size: int, threshold: float) -> None:
    text = "x" * size
    for p, pays in ((threshold - 0.01, False), (threshold + 0.01, True)):
        expected = p * reward(text, "accepted", SPEC) + (1 - p) * reward(text, "rejected", SPEC)
        assert (expected > 0) is pays


def test_a_single_character_never_pays() -> None:
    assert reward(")", "accepted", SPEC) < 0


def test_a_coin_flip_earns_something_sensible_at_every_size() -> None:
    flips = [0.5 * (reward("x" * size, "accepted", SPEC) + reward("x" * size, "rejected", SPEC)) for size in (1, 3, 30, 60, 4000)]
    assert flips == sorted(flips)
    assert flips[0] < 0 and flips[2] == pytest.approx(0.25) and flips[-1] < 0.75


@given(st.integers(0, 10_000), st.integers(1, 10_000))
def test_value_is_bounded_and_grows(size: int, more: int) -> None:
    assert 0 <= terms.value(size, SPEC) < terms.value(size + more, SPEC) < 1 + SPEC.size_gain


def test_blanks_are_worth_nothing() -> None:
    assert reward("f(x)" + " " * 40, "accepted", SPEC) == pytest.approx(reward("f(x)", "accepted", SPEC))
    assert reward("    ", "accepted", SPEC) == pytest.approx(-0.25)
