"""Intervals cover what they say, tests keep their error, and known sample sizes come out; by simulation where there is no closed form."""

import math

import numpy as np
import pytest
from scipy.stats import beta

from keepgrad import stats


def test_wilson_holds_the_published_example_and_the_edges() -> None:
    half = stats.wilson(81, 263)  # Newcombe 1998, table I, method 3
    assert (round(half.low, 4), round(half.high, 4)) == (0.2553, 0.3662)
    none = stats.wilson(0, 20)
    assert none.low == 0.0 and round(none.high, 4) == 0.1611
    assert stats.wilson(20, 20).high == 1.0
    assert math.isnan(stats.wilson(0, 0).estimate)


def test_wilson_covers() -> None:
    rng = np.random.default_rng(0)
    hits = [stats.wilson(k, 50) for k in rng.binomial(50, 0.22, size=2000)]
    covered = np.mean([interval.low <= 0.22 <= interval.high for interval in hits])
    assert 0.93 < covered < 0.975


def _files(rng: np.random.Generator, files: int, gain: float) -> tuple[np.ndarray, ...]:
    """Three contexts a file, whose acceptance hangs together by file; after: `gain` times as likely, less shown."""
    rate = np.repeat(beta.rvs(2, 6, size=files, random_state=rng), 3)
    shown = rng.random(3 * files) < 0.8
    before = rng.random(3 * files) < rate
    after = shown & (rng.random(3 * files) < rate * gain)
    return before.astype(float), np.ones(3 * files), after.astype(float), shown.astype(float)


def _names(files: int) -> list[str]:
    return [f"f{at // 3}" for at in range(3 * files)]


def test_relative_change_covers_the_truth_with_clustered_files() -> None:
    rng, names, covered = np.random.default_rng(1), _names(80), []
    for seed in range(200):
        b, ones, a, shown = _files(rng, 80, 1.3)
        interval = stats.relative_change((b, ones), (a, shown), names, seed, draws=1000)
        covered.append(interval.low <= 0.3 <= interval.high)
    assert 0.91 < np.mean(covered) < 0.985


def test_ratio_by_cluster_is_wider_than_by_row_and_covers() -> None:
    rng, covered, wider = np.random.default_rng(2), [], []
    for seed in range(200):
        rate = np.repeat(beta.rvs(1, 3, size=60, random_state=rng), 8)  # a file's contexts hang together: correlation 0.2
        taken = (rng.random(480) < rate).astype(float)
        by_file = stats.ratio(taken, np.ones(480), [f"f{at // 8}" for at in range(480)], seed)
        covered.append(by_file.low <= 0.25 <= by_file.high)
        if seed < 20:
            by_row = stats.ratio(taken, np.ones(480), [f"r{at}" for at in range(480)], seed)
            wider.append((by_file.high - by_file.low) / (by_row.high - by_row.low))
    assert 0.90 < np.mean(covered) < 0.985
    assert 1.3 < np.mean(wider) < 1.8  # square root of the design effect 1 + 7 * 0.2 is 1.55


def test_bootstrap_does_not_depend_on_the_order_of_rows_and_repeats_by_seed() -> None:
    b, ones, a, shown = _files(np.random.default_rng(3), 40, 1.3)
    names, order = _names(40), np.random.default_rng(4).permutation(120)
    one = stats.relative_change((b, ones), (a, shown), names, 7)
    other = stats.relative_change((b[order], ones), (a[order], shown[order]), [names[at] for at in order], 7)
    assert one == other
    assert one != stats.relative_change((b, ones), (a, shown), names, 8)


def test_resampling_keeps_shape_and_mean_and_refuses_nothing() -> None:
    sums = np.arange(60, dtype=float).reshape(10, 3, 2)
    totals = stats.cluster_resample(sums, 2000, seed=0)
    assert totals.shape == (2000, 3, 2)
    assert np.allclose(totals.mean(0), sums.sum(0), rtol=0.02)
    with pytest.raises(ValueError, match="no clusters"):
        stats.cluster_resample(sums[:0])


def test_what_is_not_defined_is_never_a_number_or_a_pass() -> None:
    zero, ones, names = np.zeros(9), np.ones(9), _names(3)
    unknown = stats.relative_change((zero, ones), (ones, ones), names)
    assert math.isnan(unknown.estimate) and (unknown.low, unknown.high) == (-math.inf, math.inf)
    silent = stats.non_inferior((ones, ones), (zero, zero), names, margin=0.1)
    assert silent.p == 1.0 and not silent.passed


def test_non_inferiority_keeps_its_error_at_the_margin_and_finds_equals() -> None:
    rng, names = np.random.default_rng(5), _names(150)
    at_margin, equal = [], []
    for seed in range(150):
        b, ones, a, shown = _files(rng, 150, 0.8)
        at_margin.append(stats.non_inferior((b, ones), (a, shown), names, margin=0.2, seed=seed, draws=600).passed)
        b, ones, a, shown = _files(rng, 150, 1.25)
        equal.append(stats.non_inferior((b, ones), (a, shown), names, margin=0.2, seed=seed, draws=600).passed)
    assert np.mean(at_margin) < 0.09
    assert np.mean(equal) > 0.9


def test_non_inferiority_of_a_cost_looks_the_other_way() -> None:
    names, ones = _names(40), np.ones(120)
    cost = np.random.default_rng(6).random(120)
    assert not stats.non_inferior((cost, ones), (cost * 1.5, ones), names, margin=0.1, higher_is_better=False).passed
    assert stats.non_inferior((cost, ones), (cost * 0.5, ones), names, margin=0.1, higher_is_better=False).passed
    with pytest.raises(ValueError, match="margin"):
        stats.non_inferior((cost, ones), (cost, ones), names, margin=0.0)


def test_holm_by_hand_and_its_family_wise_error() -> None:
    adjusted = stats.holm_adjusted({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert {name: round(p, 3) for name, p in adjusted.items()} == {"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02}
    assert stats.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == {"a": True, "b": False, "c": False, "d": True}
    rng = np.random.default_rng(7)
    false = [any(stats.holm({str(at): p for at, p in enumerate(rng.random(5))}).values()) for _ in range(4000)]
    assert np.mean(false) < 0.06


def test_confidence_sequence_with_users_arriving_alarms_falsely_less_than_stated() -> None:
    rng, runs = np.random.default_rng(8), 600
    false = 0
    for _ in range(runs):
        a, b = beta.rvs(2, 5, size=(2, 300), random_state=rng)  # user means, skewed
        looks = (stats.mean_difference(a[:n], b[:n]) for n in range(8, 301, 4))
        false += any(look.excludes(0.0) for look in looks)
    assert false / runs < 0.05


def test_a_fixed_interval_read_at_each_look_alarms_far_more_often() -> None:
    rng, runs, false = np.random.default_rng(8), 300, 0
    for _ in range(runs):
        a, b = beta.rvs(2, 5, size=(2, 300), random_state=rng)
        for n in range(8, 301, 4):
            error = math.sqrt(a[:n].var(ddof=1) / n + b[:n].var(ddof=1) / n)
            if abs(a[:n].mean() - b[:n].mean()) > 1.96 * error:
                false += 1
                break
    assert false / runs > 0.2


def test_confidence_sequence_with_the_same_few_users_looked_at_again() -> None:
    """A canary's users stay the same while each one's opportunities grow: 12 against 28 users, 20 looks, acceptance differs by user."""
    rng, runs, false = np.random.default_rng(9), 400, 0
    for _ in range(runs):
        rate = beta.rvs(2, 5, size=40, random_state=rng)
        taken = (rng.random((40, 100)) < rate[:, None]).cumsum(1)
        looks = (stats.mean_difference(taken[12:, n - 1] / n, taken[:12, n - 1] / n) for n in range(5, 101, 5))
        false += any(look.excludes(0.0) for look in looks)
    assert false / runs < 0.05


def test_confidence_sequence_finds_a_large_harm_and_waits_for_enough_users() -> None:
    rng = np.random.default_rng(10)
    a, b = rng.normal(0.3, 0.1, 40), rng.normal(0.1, 0.1, 40)
    assert stats.mean_difference(a, b).high < 0
    few = stats.mean_difference(a[:5], b[:5])
    assert few.estimate == pytest.approx(b[:5].mean() - a[:5].mean()) and (few.low, few.high) == (-math.inf, math.inf)
    assert stats.mean_difference([], b).low == -math.inf
    assert stats.confidence_radius(0.0, 50) == math.inf


def test_confidence_radius_is_the_papers_formula() -> None:
    rho2 = (-2 * math.log(0.05) + math.log(-2 * math.log(0.05) + 1)) / 50
    t, sigma = 80.0, 2.0
    paper = sigma * math.sqrt(2 * (t * rho2 + 1) / (t * t * rho2) * math.log(math.sqrt(t * rho2 + 1) / 0.05))
    assert stats.confidence_radius(sigma / math.sqrt(t), t, tuned_for=50) == pytest.approx(paper)
    tuned = [stats.confidence_radius(1 / math.sqrt(100), 100, tuned_for=n) for n in (25, 100, 400)]
    assert tuned[1] == min(tuned)


def test_sample_ratio_flags_a_broken_assignment_and_not_a_fair_one() -> None:
    assert stats.sample_ratio([300, 700], [0.3, 0.7]) == pytest.approx(1.0)
    assert stats.sample_ratio([400, 600], [0.3, 0.7]) < 0.001
    assert stats.sample_ratio([0, 0], [0.5, 0.5]) == 1.0
    rng = np.random.default_rng(11)
    low = [stats.sample_ratio([k, 200 - k], [0.3, 0.7]) < 0.001 for k in rng.binomial(200, 0.3, size=3000)]
    assert np.mean(low) < 0.004
    with pytest.raises(ValueError, match="share"):
        stats.sample_ratio([1, 2], [1.0, 0.0])


def test_sample_sizes_of_the_literature() -> None:
    assert stats.units_needed(0.7, 0.0228) == pytest.approx(12_700, rel=0.01)
    assert stats.units_needed(0.10, -0.0313) == pytest.approx(142_000, rel=0.01)
    assert stats.design_effect(50, 0.05) == pytest.approx(3.45)


def test_the_detectable_effect_is_detected_four_times_out_of_five() -> None:
    rng = np.random.default_rng(12)
    effect = stats.detectable(0.1)
    found = np.abs(rng.normal(effect, 0.1, size=20_000)) > stats.z(0.975) * 0.1
    assert np.mean(found) == pytest.approx(0.8, abs=0.01)
