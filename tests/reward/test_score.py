"""Places, samples, baselines and caps, against values worked out by hand or the long way round."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepgrad.config import Train
from keepgrad.errors import ConfigError, TrainError
from keepgrad.outcomes.episode import outcome
from keepgrad.policy.verdict import FEATURES, cuts
from keepgrad.records import Event, Sample, Tokens
from keepgrad.reward import score as scoring
from keepgrad.reward.score import Scored, samples, score, user_weights
from keepgrad.reward.spec import load
from tests.reward.make import LATER, T0, generation, prompter, scored

SPEC = load()
WIDE = Train(user_cap=1.0)
FREE = msgspec.structs.replace(SPEC, user_cap=1.0)


def _batch(rows: list[Scored], baseline: str = "mean", train: Train = WIDE) -> list[Sample]:
    return samples(rows, FREE, msgspec.structs.replace(train, baseline=baseline), prompter())


def test_each_place_by_its_reason() -> None:
    served = generation("g")
    shown, closed = Event("1", "g", "shown", T0), Event("2", "g", "closed", T0)
    cases = [
        (served, [], T0, "pending", "waiting"),
        (served, [shown], T0, "pending", "unsettled"),
        (served, [shown], LATER, "rewarded", "expired"),
        (served, [shown, closed], LATER, "censored", "closed"),
        (served, [], LATER, "censored", "closed"),
        (served, [Event("3", "g", "not_drawn", T0)], LATER, "excluded", "not_drawn"),
        (generation("g", consent="metadata", text=""), [shown], LATER, "excluded", "consent"),
        (generation("g", shown=False), [], T0, "rewarded", "abstained"),
        (generation("g", text=""), [], T0, "rewarded", "abstained"),
        (generation("g", finish="length"), [shown, Event("4", "g", "rejected", T0)], LATER, "rewarded", "rejected"),
    ]
    for made, events, now_ms, place, reason in cases:
        found = score(made, outcome(made, events, now_ms), SPEC)
        assert (found.place, found.reason, found.events) == (place, reason, len(events))
        assert bool(found.terms) == (place == "rewarded")


def _four() -> list[Scored]:
    return [
        scored(generation("a", "x" * 30), "accepted", FREE, settled="x" * 30),
        scored(generation("b", "x" * 30), "rejected", FREE, settled="total += 1  "),
        scored(generation("c", "x" * 30), "rejected", FREE),
        scored(generation("d", shown=False), "", FREE),
    ]


def test_advantages_of_draft_and_verdict() -> None:
    batch = _batch(_four())
    assert [sample.reward for sample in batch] == pytest.approx([0.75, -0.25, -0.25, 0.0])
    drafts = [sample.advantages[:-1] for sample in batch]
    assert [draft[0] for draft in drafts] == pytest.approx([1.0, -0.5, -0.5, 0.0])  # r minus the mean of the other two shown
    assert all(len(draft) == 2 and draft[0] == draft[1] for draft in drafts)
    assert [sample.advantages[-1] for sample in batch] == pytest.approx([0.75, -0.25, -0.25, 0.0])
    assert [sample.shown for sample in batch] == [True, True, True, False]


def test_settled_text_is_one_line_with_its_newline_and_the_space_of_a_healed_prompt() -> None:
    batch = _batch(_four())
    assert prompter().decode(batch[0].settled_ids) == "x" * 30 + "\n"
    assert prompter().decode(batch[1].settled_ids) == "total += 1\n"
    assert batch[2].settled_ids == [] and batch[3].settled_ids == []
    healed = scored(generation("h", healed=True), "rejected", FREE, settled="b + c\nnext")
    assert prompter().decode(_batch([healed])[0].settled_ids) == " b + c\n"
    pasted = scored(generation("p"), "rejected", FREE, settled="y" * 201)
    assert _batch([pasted])[0].settled_ids == []


def test_only_what_is_rewarded_becomes_a_sample_and_nothing_is_a_batch_of_none() -> None:
    rows = [scored(generation("w"), "", FREE), scored(generation("m", consent="metadata"), "accepted", FREE), *_four()]
    assert [sample.generation for sample in _batch(rows)] == ["a", "b", "c", "d"]
    assert _batch(rows[:2]) == []
    assert _batch(_four()[:1])[0].advantages == pytest.approx([0.75, 0.75, 0.75])  # alone: nothing to compare with


def _many(count: int, seed: int) -> list[Scored]:
    rng = np.random.default_rng(seed)
    rows = []
    for at in range(count):
        features = rng.normal(size=len(FEATURES)).tolist()
        p = 1 / (1 + np.exp(-features[0] - 0.5 * features[1]))
        end = "" if rng.random() < 0.2 else "accepted" if rng.random() < p else "rejected"
        rows.append(scored(generation(f"g{at}", "x" * 30, f"u{at % 7}", shown=bool(end)), end, FREE, features=features))
    return rows


def test_bucket_baseline_is_the_mean_of_the_others_in_the_bucket() -> None:
    batch = _batch(_many(120, 0), "bucket")
    assert {sample.bucket for sample in batch} == set(range(8))
    for sample in (one for one in batch if one.shown):
        others = [one.reward for one in batch if one.shown and one.bucket == sample.bucket and one is not sample]
        assert sample.advantages[0] == pytest.approx(sample.reward - np.mean(others))
    edges = [max(one.features[0][0] for one in batch if one.bucket == bucket) for bucket in range(8)]
    assert edges == sorted(edges)


def test_a_lone_row_of_a_bucket_is_held_against_all_others() -> None:
    rows = [scored(generation(f"g{at}", "x" * 30), "accepted" if at == 0 else "rejected", FREE, features=[float(at)]) for at in range(8)]
    batch = _batch(rows, "bucket")
    assert batch[0].advantages[0] == pytest.approx(0.75 + 0.25)


def test_value_baseline_equals_leaving_out_and_fitting_again() -> None:
    batch = _batch(_many(40, 1), "value")
    shown = [sample for sample in batch if sample.shown]
    columns = [FEATURES.index(name) for name in scoring.CONTEXT]
    x = np.array([[sample.features[0][at] for at in columns] for sample in shown])
    x = np.column_stack([np.ones(len(x)), (x - x.mean(0)) / x.std(0)])
    y = np.array([sample.reward for sample in shown])
    penalty = np.diag([0.0] + [1.0] * len(columns))
    for at, sample in enumerate(shown):
        rest = np.arange(len(y)) != at
        fitted = x[at] @ np.linalg.solve(x[rest].T @ x[rest] + penalty, x[rest].T @ y[rest])
        assert sample.advantages[0] == pytest.approx(y[at] - fitted)


def test_a_baseline_never_sees_its_own_reward_or_its_own_draft() -> None:
    rows = _many(60, 2)
    at = next(index for index, row in enumerate(rows) if row[2].end == "rejected")
    for kind in ("mean", "bucket", "value"):
        before = _batch(rows, kind)[at]
        other = [*rows[:at], scored(rows[at][0], "accepted", FREE, features=rows[at][1].features[0]), *rows[at + 1 :]]
        after = _batch(other, kind)[at]
        assert after.reward - after.advantages[0] == pytest.approx(before.reward - before.advantages[0])
        drafted = list(rows[at][1].features[0])
        drafted[FEATURES.index("mean_logp")] += 3.0
        other = [*rows[:at], scored(rows[at][0], "rejected", FREE, features=drafted), *rows[at + 1 :]]
        assert _batch(other, kind)[at].advantages == pytest.approx(before.advantages)


def test_baselines_lower_the_variance_where_context_tells() -> None:
    rows = _many(600, 3)
    spread = {kind: np.var([one.advantages[0] for one in _batch(rows, kind) if one.shown]) for kind in ("mean", "bucket", "value")}
    assert spread["bucket"] < 0.95 * spread["mean"] and spread["value"] < 0.95 * spread["mean"]


def test_advantages_are_not_divided_by_a_spread() -> None:
    """Ten times the reward differences would be the same advantages if they were; here they scale with tau's spec."""
    rows = [scored(generation(f"g{at}", "x" * size), "accepted", FREE) for at, size in enumerate((6, 12, 24))]
    spread = np.std([one.advantages[0] for one in _batch(rows)])
    assert 0.05 < spread < 0.6


def test_user_weights_by_hand() -> None:
    assert user_weights({}, 0.1) == {}
    assert user_weights({"a": 5}, 0.1) == {"a": 1.0}
    assert user_weights({"a": 90, "b": 10}, 0.1) == pytest.approx({"a": 1 / 9, "b": 1.0})
    assert user_weights({"flood": 1000} | {f"u{at}": 10 for at in range(19)}, 0.1)["flood"] == pytest.approx(190 / 9 / 1000)


@given(st.dictionaries(st.integers(0, 40).map(str), st.integers(1, 500), min_size=1), st.floats(0.02, 1.0))
def test_no_user_has_more_than_the_cap(counts: dict[str, int], cap: float) -> None:
    weights = user_weights(counts, cap)
    mass = {user: weights[user] * count for user, count in counts.items()}
    allowed = max(cap, 1 / len(counts)) * sum(mass.values())
    assert all(0 < weight <= 1 for weight in weights.values())
    assert all(part <= allowed * (1 + 1e-6) for part in mass.values())
    for user, part in mass.items():  # who is not at the cap is not touched
        assert weights[user] == 1 or part == pytest.approx(allowed)


def test_the_stricter_cap_of_spec_and_configuration_holds() -> None:
    rows = [scored(generation(f"g{at}", user="loud" if at < 40 else f"u{at}"), "accepted", SPEC) for at in range(80)]
    for spec, train, cap in ((SPEC, WIDE, 0.1), (FREE, Train(user_cap=0.05), 0.05)):
        batch = samples(rows, spec, train, prompter())
        loud = sum(sample.weight for sample in batch[:40]) / sum(sample.weight for sample in batch)
        assert loud == pytest.approx(cap)


def test_what_does_not_fit_is_refused_and_named() -> None:
    served, tokens, found, kept = _four()[0]
    cases: list[tuple[Tokens, str]] = [
        (msgspec.structs.replace(tokens, logprobs=[-0.1]), "1 log-probs"),
        (msgspec.structs.replace(tokens, completion_ids=[1, 2, 3], logprobs=[0.0] * 3), "3 token ids"),
        (msgspec.structs.replace(tokens, generation="z"), "another"),
        (msgspec.structs.replace(tokens, cuts=[1]), "cut at 2"),
        (msgspec.structs.replace(tokens, cuts=[1, 2]), "1 rows of features"),
        (msgspec.structs.replace(tokens, features=[[float("nan")]]), "not a number"),
    ]
    for wrong, says in cases:
        with pytest.raises(TrainError, match=says) as caught:
            _batch([(served, wrong, found, kept)])
        assert "generation a" in str(caught.value)
    with pytest.raises(TrainError, match="features"):
        _batch([(served, msgspec.structs.replace(tokens, features=[[1.0]]), found, kept), _four()[1]])
    with pytest.raises(ConfigError, match="bucket, mean or value"):
        _batch(_four(), "median")


def test_the_same_rows_give_the_same_samples() -> None:
    assert _batch(_many(50, 4), "value") == _batch(_many(50, 4), "value")


def _drafted(text: str, shown: str, settled: str, healed: bool = False, end: str = "rejected") -> Sample:
    """The sample of a draft of one-byte tokens of which `shown` was shown."""
    ids = prompter().encode_text((" " if healed else "") + text)
    texts = [prompter().clean(ids[:tokens], healed) for tokens in range(1, len(ids) + 1)]
    cut = next(cut for cut in cuts(texts) if texts[cut - 1] == shown)
    served = generation("g", shown, completion_tokens=len(ids), cut=cut, healed=healed)
    row = scored(served, end, FREE, settled=settled)
    return _batch([(row[0], Tokens("g", [1], ids, [-0.1] * len(ids), cuts(texts), [[0.0]] * len(cuts(texts))), row[2], row[3])])[0]


def test_what_was_written_instead_judges_every_cut_also_those_not_shown() -> None:
    sample = _drafted("self.path(name, 3)", "self.path(name, 3)", "self.path(names)")
    texts = ["self", "self.", "self.path", "self.path(", "self.path(name", "self.path(name,", "self.path(name, 3", "self.path(name, 3)"]
    assert [prompter().clean(sample.completion_ids[:cut], False) for cut in sample.cuts] == texts
    assert sample.right == [True] * 4 + [False] * 4, "name is the start of another word"
    assert _drafted("x = 1", "x =", "x = 12", healed=True).right == [True, True, False]
    assert _drafted("total", "total", "").right == [], "what nobody knows is not guessed"


def test_tokens_behind_the_cut_earn_nothing() -> None:
    sample = _drafted("abc(de)", "abc", "abc(f)", end="accepted")
    assert sample.taken == 1.0 and sample.advantages[:3] == [sample.reward] * 3 and sample.advantages[3:-1] == [0.0] * 4
