"""The numbers a policy is judged by, against hand-made cases."""

import json
import random

import pytest

from keepgrad import metrics
from keepgrad.errors import GateError
from keepgrad.metrics import Judged


def _judged(name: str, shown: bool = True, accepted: bool = False, chars: int = 0, cluster: str = "") -> Judged:
    return Judged(
        context=name, cluster=cluster or name, shown=shown, accepted=accepted, accepted_chars=chars, shown_chars=10 if shown else 0
    )


BEFORE = [_judged(f"c{at}", True, at % 5 == 0, 10 if at % 5 == 0 else 0, f"f{at // 2}") for at in range(20)]
AFTER = [_judged(f"c{at}", at % 5 != 2, at % 5 == 0, 9 if at % 5 == 0 else 0, f"f{at // 2}") for at in range(20)]


def test_summary_by_hand() -> None:
    found = metrics.summary(AFTER)
    assert (found["opportunities"], found["shown"], found["accepted"]) == (20, 16, 4)
    assert found["shown_rate"] == 0.8 and found["accept_rate"] == pytest.approx(4 / 16)
    assert found["accepted_chars"] == pytest.approx(36 / 20) and found["length"] == 10
    low, high = found["accept_rate_ci"]
    assert low < 4 / 16 < high


def test_change_by_hand() -> None:
    found = metrics.change(BEFORE, AFTER, seed=3)
    assert found["shown_change"] == pytest.approx(-0.2)
    assert found["accept_rate_change"] == pytest.approx((4 / 16) / (4 / 20) - 1)
    assert found["accepted_chars_change"] == pytest.approx(-0.1)
    assert found["accepted_chars_change_ci"] == pytest.approx([-0.1, -0.1])  # the same everywhere, so no resampling moves it
    assert (found["opportunities"], found["clusters"]) == (20, 10)
    assert set(found) >= {
        "shown_change",
        "accept_rate_change",
        "accept_rate_change_ci",
        "accepted_chars_change",
        "accepted_chars_change_ci",
    }


def test_change_pairs_by_context_not_by_position() -> None:
    shuffled = random.Random(0).sample(AFTER, len(AFTER))
    assert metrics.change(BEFORE, shuffled, seed=3) == metrics.change(BEFORE, AFTER, seed=3)


def test_nothing_is_shown_is_none_not_zero_and_fits_json() -> None:
    silent = [_judged(one.context, shown=False, cluster=one.cluster) for one in BEFORE]
    found = metrics.change(BEFORE, silent)
    assert found["accept_rate_change"] is None and found["accept_rate_change_ci"] == [None, None]
    assert found["shown_change"] == -1.0 and found["accepted_chars_change"] == -1.0
    assert metrics.summary(silent)["accept_rate"] is None and metrics.summary([])["accepted_chars"] is None
    json.dumps([found, metrics.summary(silent), metrics.summary([])], allow_nan=False)


def test_what_is_silent_counts_nothing_whatever_it_says() -> None:
    odd = [Judged(context="c", cluster="f", shown=False, accepted=True, accepted_chars=9, shown_chars=0)]
    assert metrics.summary(odd)["accepted"] == 0 and metrics.summary(odd)["accepted_chars"] == 0


def test_non_inferior_passes_itself_and_fails_a_planted_loss() -> None:
    many = [_judged(f"c{at}", accepted=at % 3 == 0, chars=10 if at % 3 == 0 else 0) for at in range(300)]
    worse = [_judged(f"c{at}", accepted=at % 6 == 0, chars=10 if at % 6 == 0 else 0) for at in range(300)]
    for metric in ("accept_rate", "accepted_chars"):
        assert metrics.non_inferior(many, many, metric, margin=0.1).passed
        assert not metrics.non_inferior(many, worse, metric, margin=0.1).passed


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (BEFORE, AFTER[:-1], "one policy only"),
        (BEFORE + BEFORE[:1], AFTER, "twice"),
        ([], [], "no contexts"),
        (BEFORE[:1], [_judged("c0", cluster="elsewhere")], "cluster"),
    ],
)
def test_what_cannot_be_paired_is_refused(before: list[Judged], after: list[Judged], says: str) -> None:
    with pytest.raises(GateError, match=says):
        metrics.change(before, after)
