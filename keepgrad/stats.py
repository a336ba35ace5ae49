"""Intervals, sequential tests and power, as pure functions of numbers. Nothing here knows what a suggestion is.

    of a count            wilson
    of sums by cluster    cluster_resample, ratio, relative_change, non_inferior   (whole clusters: what one file saw hangs together)
    at every look         confidence_radius, mean_difference                       (may be read as often as one likes)
    of many tests         holm, holm_adjusted
    of an experiment      sample_ratio, detectable, units_needed, design_effect
    curves                logistic, saturating

Everything random takes a seed and gives the same answer for the same seed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import expit, ndtri, stdtrit
from scipy.stats import chisquare

Floats = npt.NDArray[np.float64]
DRAWS = 4000
"""Bootstrap draws unless told: the end of a 95 % interval then moves by about 1 % of its width from seed to seed."""
_CHUNK = 500_000
"""Most numbers of resampling counts held at a time (4 MB)."""


class Interval(NamedTuple):
    """An estimate and its interval; nan where there is nothing to estimate from, infinite where one side is open."""

    estimate: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """True if `value` lies outside; never for an interval with a nan end."""
        return value < self.low or value > self.high


class NonInferiority(NamedTuple):
    """One test of non-inferiority: `p` is small when the loss is surely smaller than the margin; `passed` at the alpha it was asked for."""

    interval: Interval
    p: float
    margin: float
    passed: bool
    detectable: float
    """Smallest true relative change that this many clusters would have shown with power 0.8 (P9)."""


def z(probability: float) -> float:
    """Quantile of the standard normal: z(0.975) is 1.96."""
    return float(ndtri(probability))


def wilson(successes: float, trials: float, confidence: float = 0.95) -> Interval:
    """Wilson score interval of a share (Wilson 1927), inside [0, 1] and sensible at 0 and at all; (nan, 0, 1) without trials."""
    if trials <= 0:
        return Interval(math.nan, 0.0, 1.0)
    width, share = z(0.5 + confidence / 2), successes / trials
    scale = 1 + width * width / trials
    centre = (share + width * width / (2 * trials)) / scale
    half = width / scale * math.sqrt(share * (1 - share) / trials + width * width / (4 * trials * trials))
    low = 0.0 if successes <= 0 else max(centre - half, 0.0)
    high = 1.0 if successes >= trials else min(centre + half, 1.0)
    return Interval(share, low, high)


def cluster_sums(values: npt.ArrayLike, clusters: Sequence[str]) -> Floats:
    """Sum the rows of `values` (N, K) by cluster name: (C, K), clusters in sorted order so that the order of rows does not matter."""
    rows = np.atleast_2d(np.asarray(values, dtype=np.float64))
    names, index = np.unique(np.asarray(clusters, dtype=np.str_), return_inverse=True)
    sums = np.zeros((len(names), rows.shape[1]))
    np.add.at(sums, index.reshape(-1), rows)
    return sums


def cluster_resample(sums: Floats, draws: int = DRAWS, seed: int = 0) -> Floats:
    """Total sums under resampling of the clusters with replacement (Davison and Hinkley 1997, section 3.8): (C, ...) to (draws, ...).

    Drawing clusters is counting how often each comes, so all draws are one matrix product: counts (draws, C) times sums (C, K).
    Raises ValueError without clusters.
    """
    clusters = len(sums)
    if not clusters:
        raise ValueError("no clusters to resample: give at least one row of sums")
    rng = np.random.default_rng(seed)
    flat = np.asarray(sums, dtype=np.float64).reshape(clusters, -1)
    totals = np.empty((draws, flat.shape[1]))
    step = max(1, _CHUNK // clusters)
    for start in range(0, draws, step):
        rows = min(step, draws - start)
        drawn = rng.integers(0, clusters, size=(rows, clusters)) + clusters * np.arange(rows)[:, None]
        counts = np.bincount(drawn.reshape(-1), minlength=rows * clusters).reshape(rows, clusters)
        totals[start : start + rows] = counts.astype(np.float64) @ flat
    return totals.reshape((draws, *np.shape(sums)[1:]))


def percentile_interval(estimate: float, values: Floats, confidence: float = 0.95) -> Interval:
    """Percentile interval of bootstrap values. An undefined value (nan) may be anything: it counts as -inf below and as +inf above."""
    tail = (1 - confidence) / 2
    undefined = np.isnan(values)
    # `lower` and `higher` never interpolate, so an infinite neighbour cannot turn a finite end into nan; both widen the interval.
    low = float(np.quantile(np.where(undefined, -np.inf, values), tail, method="lower"))
    high = float(np.quantile(np.where(undefined, np.inf, values), 1 - tail, method="higher"))
    return Interval(estimate, low, high)


def ratio(
    numerator: npt.ArrayLike, denominator: npt.ArrayLike, clusters: Sequence[str], seed: int = 0, confidence: float = 0.95
) -> Interval:
    """Ratio of sums, sum(numerator) / sum(denominator), with a cluster-bootstrap interval. All have length N, 0 is allowed."""
    sums = cluster_sums(np.column_stack([_column(numerator), _column(denominator)]), clusters)
    estimate = float(_ratio_of(sums.sum(0)))
    if not len(sums):
        return Interval(estimate, -math.inf, math.inf)
    return percentile_interval(estimate, _ratio_of(cluster_resample(sums, seed=seed)), confidence)


def relative_change(
    before: tuple[npt.ArrayLike, npt.ArrayLike],
    after: tuple[npt.ArrayLike, npt.ArrayLike],
    clusters: Sequence[str],
    seed: int = 0,
    confidence: float = 0.95,
    draws: int = DRAWS,
) -> Interval:
    """Relative change of a ratio of sums, paired: (a_num / a_den) / (b_num / b_den) - 1, with a cluster-bootstrap interval.

    `before` and `after` are (numerator, denominator), each of length N, rows of the same opportunity at the same place. For a mean, pass
    ones as the denominator. nan where it is not defined (nothing before, or nothing to divide by).
    """
    sums = _paired_sums(before, after, clusters)
    estimate = float(_change_of(sums.sum(0)))
    return percentile_interval(estimate, _change_of(cluster_resample(sums, draws, seed)), confidence)


def non_inferior(
    before: tuple[npt.ArrayLike, npt.ArrayLike],
    after: tuple[npt.ArrayLike, npt.ArrayLike],
    clusters: Sequence[str],
    margin: float,
    seed: int = 0,
    alpha: float = 0.05,
    higher_is_better: bool = True,
    draws: int = DRAWS,
) -> NonInferiority:
    """Test that a ratio of sums lost less than `margin`, relatively (one-sided at `alpha`), by cluster bootstrap.

    The hypothesis to be refuted is "change <= -margin" (or ">= margin" when lower is better); p is the share of bootstrap draws in it, with
    one added to both counts so that it is never 0 (Davison and Hinkley 1997, section 4.2). An undefined draw counts as a loss. For several
    metrics pass their p to `holm`. Arguments as in `relative_change`; the interval is the two-sided one at 1 - 2 alpha, which tells the
    same story.
    """
    if margin <= 0:
        raise ValueError(f"margin is {margin}: it must be above 0, for no sample proves a loss of exactly nothing")
    sums = _paired_sums(before, after, clusters)
    values = _change_of(cluster_resample(sums, draws, seed))
    interval = percentile_interval(float(_change_of(sums.sum(0))), values, 1 - 2 * alpha)
    gain = values if higher_is_better else -values
    p = float((1 + np.count_nonzero(~(gain > -margin))) / (1 + len(values)))
    if math.isnan(interval.estimate):
        p = 1.0
    spread = float(np.std(values)) if np.isfinite(values).all() else math.inf
    return NonInferiority(interval, p, margin, p <= alpha, detectable(spread))


def holm(p_values: Mapping[str, float], alpha: float = 0.05) -> dict[str, bool]:
    """Holm's step-down (1979): which hypotheses are refuted, with the chance of any false one at most `alpha` however they depend."""
    return {name: p <= alpha for name, p in holm_adjusted(p_values).items()}


def holm_adjusted(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p, by name: compare each with alpha."""
    adjusted, highest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: (item[1], item[0]))):
        highest = max(highest, min((len(p_values) - rank) * p, 1.0))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p_values}


def confidence_radius(standard_error: float, units: float, alpha: float = 0.05, tuned_for: float = 100.0) -> float:
    """Half-width of an asymptotic confidence sequence: it holds at all looks together, so one may stop whenever one likes.

    Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas: "Time-uniform central limit theory and asymptotic confidence sequences" (2021), thm 2.2

        sigma sqrt( 2 (t rho^2 + 1) / (t^2 rho^2) * log( sqrt(t rho^2 + 1) / alpha ) ),      sigma = standard_error sqrt(t)

    with t = `units` and rho such that it is tightest at `tuned_for` units, which must be fixed beforehand; 1.55 times the half-width of a
    fixed-size 95 % interval there. Infinite below 2 units or for a standard error that is not above 0.
    """
    if units < 2 or not standard_error > 0:
        return math.inf
    rho2 = (-2 * math.log(alpha) + math.log(-2 * math.log(alpha) + 1)) / tuned_for
    spread = units * rho2 + 1
    return standard_error * math.sqrt(2 * spread / (units * rho2) * math.log(math.sqrt(spread) / alpha))


def mean_difference(
    control: npt.ArrayLike, treated: npt.ArrayLike, alpha: float = 0.05, tuned_for: float = 100.0, least: int = 8
) -> Interval:
    """Anytime-valid interval of mean(treated) - mean(control), one number per user (that user's own mean), arms independent.

    Users are the units: what one user does hangs together. Under assignment with share n1 / N the influence function of the difference has
    variance N (s1^2 / n1 + s0^2 / n0), so this is `confidence_radius` with t = N and the Welch standard error. The guarantee is asymptotic:
    below `least` users in an arm the interval is infinite, and the standard error is widened by how much t exceeds the normal out there.
    """
    a, b = _column(control), _column(treated)
    difference = float(b.mean() - a.mean()) if len(a) and len(b) else math.nan
    if min(len(a), len(b)) < max(least, 2):
        return Interval(difference, -math.inf, math.inf)
    parts = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    error = math.sqrt(sum(parts))
    if error > 0:
        freedom = sum(parts) ** 2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
        tail = 1 - alpha / 20  # where the sequence's edge lies: about three standard errors out
        error *= float(stdtrit(freedom, tail)) / z(tail)
    radius = confidence_radius(error, len(a) + len(b), alpha, tuned_for)
    return Interval(difference, difference - radius, difference + radius)


def sample_ratio(counts: Sequence[int], shares: Sequence[float]) -> float:
    """p of a chi-square test that units fell into arms in these shares; below 0.001 the assignment is broken, whatever the metrics say."""
    expected = np.asarray(shares, dtype=np.float64)
    if len(counts) != len(shares) or len(counts) < 2 or (expected <= 0).any():
        raise ValueError(f"{len(counts)} counts and shares {list(shares)}: give one share above 0 for each of at least two arms")
    total = int(sum(counts))
    if not total:
        return 1.0
    return float(chisquare(np.asarray(counts), expected / expected.sum() * total).pvalue)


def detectable(standard_error: float, alpha: float = 0.05, power: float = 0.8) -> float:
    """Smallest true effect that a two-sided test at `alpha` with this standard error finds with probability `power`."""
    return (z(1 - alpha / 2) + z(power)) * standard_error


def units_needed(rate: float, relative: float, alpha: float = 0.05, power: float = 0.8) -> float:
    """Independent units per arm to see a `relative` change of a share `rate` (two-sided): 12,700 for +2.28 % on 0.7."""
    other = rate * (1 + relative)
    variance = rate * (1 - rate) + other * (1 - other)
    return detectable(1.0, alpha, power) ** 2 * variance / (other - rate) ** 2


def design_effect(per_unit: float, correlation: float) -> float:
    """By how much `per_unit` observations of one unit with this intra-class correlation inflate a variance (Kish 1965)."""
    return 1 + (per_unit - 1) * correlation


def logistic(x: npt.ArrayLike) -> Floats:
    """1 / (1 + exp(-x)), without overflow; 0 and 1 at the infinite ends."""
    result: Floats = expit(np.asarray(x, dtype=np.float64))
    return result


def saturating(size: npt.ArrayLike, gain: float, typical: float) -> Floats:
    """(1 + gain) k / (k + gain typical): 0 at size 0, 1 at `typical`, below 1 + gain always; 1 everywhere above 0 without a gain."""
    k = np.asarray(size, dtype=np.float64)
    return np.divide((1 + gain) * k, k + gain * typical, out=np.zeros(k.shape), where=k > 0)


def _column(values: npt.ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64).reshape(-1)


def _paired_sums(
    before: tuple[npt.ArrayLike, npt.ArrayLike], after: tuple[npt.ArrayLike, npt.ArrayLike], clusters: Sequence[str]
) -> Floats:
    return cluster_sums(np.column_stack([_column(part) for part in (*before, *after)]), clusters)


def _ratio_of(total: Floats) -> Floats:
    return _divide(total[..., 0], total[..., 1])


def _change_of(total: Floats) -> Floats:
    return _divide(_divide(total[..., 2], total[..., 3]), _divide(total[..., 0], total[..., 1])) - 1


def _divide(numerator: Floats, denominator: Floats) -> Floats:
    result: Floats = np.divide(numerator, denominator, out=np.full(np.shape(numerator), np.nan), where=np.asarray(denominator) != 0)
    return result
