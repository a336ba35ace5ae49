"""The gate: what counts as usable, what passes and fails, its plants, and how often it is wrong at the size it says."""

import random
from collections.abc import Sequence

import msgspec
import pytest

from keepgrad.config import Release
from keepgrad.errors import GateError
from keepgrad.records import Draft
from keepgrad.release import gate as gates
from keepgrad.release.suite import Context

TAU = 0.25
RELEASE = Release(gate_min_contexts=64)


def contexts(count: int, per_file: int = 2) -> list[Context]:
    return [Context(f"x-{i}", f"p/file_{i // per_file}.py", "p", f"name_{i} = ", f"compute(value_{i}, other)") for i in range(count)]


def draft(text: str, version: str = "v", shown: bool = True) -> Draft:
    return Draft(version, [1], [-0.1], [1], [[0.0]], "show" if shown else "silent", 0.0, 1.0 if shown else 0.0, 1, text, "stop")


def drafts(pool: Sequence[Context], right: float, shown: float, luck: int, version: str = "v") -> list[Draft]:
    """A policy that is right with a chance and shows with a chance; under the same luck, a better one is right wherever a worse one was."""
    made = []
    for context in pool:
        draw = random.Random(f"{luck}:{context.id}")
        text = context.truth if draw.random() < right else "something_else()"
        made.append(draft(text, version, draw.random() < shown))
    return made


def verdict(pool: Sequence[Context], before: list[Draft], after: list[Draft], release: Release = RELEASE) -> gates.GateVerdict:
    return gates.gate(pool, {"v-a": before, "v-b": after}, "v-b", "v-a", release, TAU, 0, "g-1", 1)


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("a + b", "a + b", True),
        ("a + b  ", "a + b", True),
        ("a + b", "a + b   ", True),
        ("x", "x", True),
        ("self.name", "self.name, other)", True),
        ("self.na", "self.name, other)", False),
        ("self.name,", "self.name, other)", True),
        ("sel", "self.name", False),
        ("f(x", "f(x)", False),
        ("fn(x", "fn(x)", True),
        ("fn(y", "fn(x)", False),
        ("fn(x) + 1", "fn(x)", False),
        (" fn(x)", "fn(x)", False),
        ("", "fn(x)", False),
        ("   ", "fn(x)", False),
    ],
)
def test_usable(text: str, truth: str, right: bool) -> None:
    assert gates.usable(text, truth) is right


def test_judge_counts_what_a_developer_would_take() -> None:
    pool = contexts(3)
    good, silent, wrong = gates.judge([draft(pool[0].truth + "   "), draft(pool[1].truth, shown=False), draft("nonsense")], pool)
    assert (good.shown, good.accepted, good.accepted_chars) == (True, True, len(pool[0].truth))
    assert (silent.shown, silent.accepted, silent.accepted_chars, silent.shown_chars) == (False, False, 0, 0)
    assert (wrong.shown, wrong.accepted, wrong.shown_chars) == (True, False, len("nonsense"))
    with pytest.raises(GateError, match="2 drafts for 3"):
        gates.judge([draft("a"), draft("b")], pool)


def test_an_identical_candidate_passes_and_a_useless_one_fails() -> None:
    pool = contexts(160)
    before = drafts(pool, 0.25, 0.9, luck=1)
    same = verdict(pool, before, before)
    assert same.decision == "pass"
    assert all(same.metrics[name]["difference"] == 0 for name in gates.METRICS)
    useless = verdict(pool, before, drafts(pool, 0.0, 0.9, luck=1))
    assert useless.decision == "fail"
    assert "accepted_chars -100.0%" in useless.reason
    assert "stop a loss of" in useless.reason


def test_a_silent_candidate_fails() -> None:
    pool = contexts(160)
    found = verdict(pool, drafts(pool, 0.25, 0.9, luck=1), drafts(pool, 0.25, 0.0, luck=1))
    assert found.decision == "fail"
    assert found.metrics["accept_rate"]["state"] == "undefined"
    assert msgspec.json.decode(msgspec.json.encode(found), type=gates.GateVerdict) == found


def test_many_contexts_prove_a_small_loss_harmless() -> None:
    pool = contexts(2_500)
    found = verdict(pool, drafts(pool, 0.30, 1.0, luck=1), drafts(pool, 0.29, 1.0, luck=1))
    assert found.decision == "pass"
    assert {found.metrics[name]["state"] for name in gates.METRICS} == {"proven"}
    assert found.metrics["accept_rate"]["high"] < 0


def test_many_contexts_stop_a_loss_beyond_the_margin() -> None:
    pool = contexts(1_500)
    found = verdict(pool, drafts(pool, 0.30, 1.0, luck=1), drafts(pool, 0.25, 1.0, luck=1))
    assert found.decision == "fail"
    assert found.metrics["accept_rate"]["state"] == "harmful"


def test_rates_of_error_are_those_it_states() -> None:
    """With 160 contexts and coupled draws: equals pass nearly always, and a loss of the stated size is stopped about four times in five."""
    pool = contexts(160)
    runs = 24
    even, worse, sizes = 0, 0, []
    for luck in range(runs):
        before = drafts(pool, 0.30, 1.0, luck)
        # The candidate differs from the incumbent in a tenth of the contexts, by fresh luck: as good on average.
        other = drafts(pool, 0.30, 1.0, luck + 1_000)
        mixed = [new if random.Random(f"{luck}{i}").random() < 0.1 else old for i, (old, new) in enumerate(zip(before, other, strict=True))]
        found = verdict(pool, before, mixed)
        even += found.decision == "pass"
        sizes.append(found.metrics["accept_rate"]["detectable"])
        loss = sum(sizes) / len(sizes)
        broken = [draft("something_else()") if random.Random(f"w{luck}{i}").random() < loss else one for i, one in enumerate(mixed)]
        worse += verdict(pool, before, broken).decision == "fail"
    assert even / runs > 0.8
    assert worse / runs > 0.65
    assert 0.1 < sum(sizes) / runs < 0.3


def test_too_few_contexts_and_nothing_to_compare_are_errors() -> None:
    pool = contexts(63)
    with pytest.raises(GateError, match="63 contexts and needs 64"):
        verdict(pool, drafts(pool, 0.3, 1.0, 1), drafts(pool, 0.3, 1.0, 1))
    pool = contexts(100)
    with pytest.raises(GateError, match="nothing accepted"):
        verdict(pool, drafts(pool, 0.0, 1.0, 1), drafts(pool, 0.3, 1.0, 1))


def test_a_gate_that_cannot_tell_bad_from_good_says_so() -> None:
    """Every context has the same answer, so drafts moved to other contexts are as good: the planted bad version would pass."""
    pool = [Context(f"x-{i}", f"p/{i}.py", "p", "x = ", "None or 0") for i in range(100)]
    same = [draft("None or 0") for _ in pool]
    with pytest.raises(GateError, match="planted bad version"):
        verdict(pool, same, same)


def test_the_verdict_does_not_depend_on_the_order_of_contexts() -> None:
    pool = contexts(120)
    before, after = drafts(pool, 0.3, 0.9, 1), drafts(pool, 0.28, 0.8, 2)
    order = list(range(120))
    random.Random(0).shuffle(order)
    shuffled = verdict([pool[i] for i in order], [before[i] for i in order], [after[i] for i in order])
    assert shuffled == verdict(pool, before, after)
