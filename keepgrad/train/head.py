"""Fits the silence head: which drafts are worth showing, from the rewards of those that were shown.

Maximise  sum_i w_i |r_i| / p_i * log sigma(sign(r_i) z_i)  -  prior/2 |theta - theta_parent|^2   over theta = (w, b) of z = w . f + b.

The reward of silence is 0, so showing is right exactly where E[r | f] > 0, and that is where the maximum puts z > 0: reward-weighted
regression (Dayan & Hinton 1997, Peters & Schaal 2007) with the mirrored action for negative rewards. p_i is the recorded probability of
showing, so what the behaviour version kept silent more often than not counts for more where it was shown. A few scalars and a convex
objective: it cannot collapse. The prior is the parent's head, so windows add up. Last, b is raised until the share `coverage` of this
window's drafts would be shown: where few drafts are worth tau the reward alone would silence nearly everything, and teams want a stated
frequency.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from keepgrad.policy.silence import FEATURES, Head
from keepgrad.records import Sample

_PRIOR = 4.0
_SCALE = 4.0


def fit_head(parent: Head, samples: Sequence[Sample], coverage: float, explore: float, seed: int) -> Head:
    """The child's head. Samples without features (e.g. at consent `metadata`) are left out; too few shown ones: the parent's head."""
    used = [sample for sample in samples if sample.features]
    shown = [sample for sample in used if sample.shown and sample.reward != 0]
    if len(shown) < 32:
        return parent
    everything = np.array([sample.features for sample in used])
    if parent.always_show:
        mean, sd = everything.mean(0), np.maximum(everything.std(0), 1e-3)
        start = np.zeros(everything.shape[1] + 1)
    else:
        mean, sd = np.array(parent.mean), np.array(parent.sd)
        start = np.array([*parent.w, parent.prior_b])
    f = (np.array([sample.features for sample in shown]) - mean) / sd
    reward = np.array([sample.reward for sample in shown])
    chance = np.exp(np.array([sample.verdict_logprob for sample in shown]))
    weight = np.abs(reward) * np.array([sample.weight for sample in shown]) / np.maximum(chance, explore)
    theta = _fit(f, np.sign(reward), weight / weight.mean(), start, _PRIOR if not parent.always_show else 1.0)
    z = ((everything - mean) / sd) @ theta[:-1] + theta[-1]
    drawable = everything[:, FEATURES.index("log_chars")] > 0  # an empty draft is never shown, however sure it is
    cut = float(np.quantile(z[drawable], 1 - min(coverage / drawable.mean(), 1.0)))
    return Head(
        mean=mean.tolist(),
        sd=sd.tolist(),
        w=theta[:-1].tolist(),
        b=float(theta[-1] + max(0.0, -cut)),
        prior_b=float(theta[-1]),
        scale=_SCALE,
    )


def _fit(
    f: npt.NDArray[np.float64], sign: npt.NDArray[np.float64], weight: npt.NDArray[np.float64], start: npt.NDArray[np.float64], prior: float
) -> npt.NDArray[np.float64]:
    design = np.column_stack([f, np.ones(len(f))])

    def objective(theta: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        margin = sign * (design @ theta)
        value = float((weight * np.logaddexp(0, -margin)).sum() + prior / 2 * ((theta - start) ** 2).sum())
        slope = -(weight * sign / (1 + np.exp(np.clip(margin, -50, 50)))) @ design + prior * (theta - start)
        return value, slope

    result: npt.NDArray[np.float64] = minimize(objective, start, jac=True, method="L-BFGS-B").x
    return result
