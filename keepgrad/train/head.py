"""Fits the verdict head: the chance that a draft, shown up to a cut, would be taken; from what was taken and what was written instead.

Maximise  sum_j w_j [ y_j log q_j + (1 - y_j) log(1 - q_j) ]  -  prior/2 |theta - theta_parent|^2,   q_j = sigma(theta . (f_j, 1)),

over cuts j of the window's drafts. Of the cut that was shown, y is the share taken. Of the others, what the developer settled on says
whether the draft up to there was right, and

    y = t(f_j) if right, u if not,      t, u: how often what was shown and right, or wrong, was taken in this window

so one suggestion teaches about all its cuts (hindsight, Andrychowicz et al. 2017, with the settled line as the goal reached). Which cut was
shown depends on the features alone, so the regression needs no weights for it. A few numbers and a convex objective: it cannot collapse.
The prior is the parent's head, so windows add up.

What is shown follows from q and the reward spec (policy/verdict.py). The reward of silence is 0, so showing pays where the expected reward
is above 0; where that is less often than the share `coverage` of all opportunities, the least worth that is shown is lowered until that
share of this window would be shown: teams want a stated frequency. Those drafts are the parent's; `calibrated` then moves the least worth
by as much as it differs between the candidate's own drafts and its parent's for the same prompts.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from keepgrad import stats
from keepgrad.policy.verdict import FEATURES, SIZE, Head
from keepgrad.records import Draft, Sample
from keepgrad.reward.spec import Spec

Floats = npt.NDArray[np.float64]
_PRIOR = 4.0
_HINDSIGHT = 0.5
"""Weight of a cut that was judged by the settled line, against 1 for one that was shown."""
_WRONG, _WRONG_WEIGHT = 0.03, 20.0
"""What is wrong is taken now and then; the rate before anything is seen, and how many suggestions that counts for."""
_FEWEST = 32
"""Shown suggestions below which the parent's head stays."""
_SIZES = [SIZE, FEATURES.index("finished")]


def fit_head(parent: Head, samples: Sequence[Sample], spec: Spec, coverage: float, cuts: bool = True) -> Head:
    """The child's head; the parent's if too few suggestions were shown. Blank drafts have no cuts and count for the coverage only.

    Without `cuts` it shows drafts whole or not at all.
    """
    drafted = [sample for sample in samples if sample.cuts]
    shown = [sample for sample in drafted if sample.shown]
    if len(shown) < _FEWEST:
        return parent
    which = [sample.cuts.index(sample.cut) for sample in shown]
    seen = np.array([sample.features[at] for sample, at in zip(shown, which, strict=True)])
    taken, weight = np.array([sample.taken for sample in shown]), np.array([sample.weight for sample in shown])
    right = np.array([bool(sample.right) and sample.right[at] for sample, at in zip(shown, which, strict=True)])
    wrong = np.array([bool(sample.right) for sample in shown]) & ~right
    taste = _logistic(seen[right][:, _SIZES], taken[right], weight[right], np.array(parent.taken or [0.0] * 3), 0.3)
    careless = (_WRONG * _WRONG_WEIGHT + taken[wrong].sum()) / (_WRONG_WEIGHT + wrong.sum())

    told = [(sample, at) for sample in shown if sample.right for at, cut in enumerate(sample.cuts) if cut != sample.cut]
    others = np.array([sample.features[at] for sample, at in told]).reshape(-1, len(FEATURES))
    if_right = stats.logistic(others[:, _SIZES] @ taste[:-1] + taste[-1])
    others_taken = np.where([sample.right[at] for sample, at in told], if_right, careless)
    others_weight = _HINDSIGHT * np.array([sample.weight for sample, _ in told])

    rows, labels = np.vstack([seen, others]), np.concatenate([taken, others_taken])
    weights = np.concatenate([weight, others_weight])
    if parent.always_show:
        mean, sd, start = rows.mean(0), np.maximum(rows.std(0), 1e-3), np.zeros(len(FEATURES) + 1)
    else:
        mean, sd, start = np.array(parent.mean), np.array(parent.sd), np.array([*parent.w, parent.b])
    theta = _logistic((rows - mean) / sd, labels, weights, start, _PRIOR)
    head = Head(
        mean=mean.tolist(),
        sd=sd.tolist(),
        w=theta[:-1].tolist(),
        b=float(theta[-1]),
        tau=spec.tau,
        size_gain=spec.size_gain,
        size_typical=spec.size_typical,
        taken=taste.tolist(),
        whole=not cuts,
    )
    return msgspec.structs.replace(head, least=min(_floor(head, [sample.features for sample in samples], coverage), 0.0))


def calibrated(head: Head, samples: Sequence[Sample], own: Mapping[str, Draft], coverage: float) -> Head:
    """The head with its least worth moved to the candidate's own drafts `own`, by generation, for some of the window's prompts.

    Paired, because the difference between two drafts for one prompt varies less than drafts do between prompts.
    """
    again = [sample for sample in samples if sample.generation in own]
    rows = [[sample.features for sample in samples], [sample.features for sample in again], [own[one.generation].features for one in again]]
    if head.always_show or not all(any(drafts) for drafts in rows):
        return head
    window, parents, children = (_floor(head, drafts, coverage) for drafts in rows)
    return msgspec.structs.replace(head, least=min(window + children - parents, 0.0))


def _floor(head: Head, drafts: Sequence[Sequence[Sequence[float]]], coverage: float) -> float:
    """The worth that the share `coverage` of these drafts (features [K, F] of each, none of a blank one) reaches."""
    worth = [head.best(np.array(features))[1] for features in drafts if features]
    return float(np.quantile(worth, 1 - min(coverage * len(drafts) / len(worth), 1.0)))


def _logistic(features: Floats, labels: Floats, weights: Floats, start: Floats, prior: float) -> Floats:
    """Weights and, last, constant of a logistic regression on labels in [0, 1], drawn towards `start`; the constant hardly."""
    design = np.column_stack([features, np.ones(len(features))])
    pull = np.array([prior] * features.shape[1] + [0.01])

    def objective(theta: Floats) -> tuple[float, Floats]:
        z, gap = design @ theta, theta - start
        value = float(weights @ (np.logaddexp(0, z) - labels * z) + pull @ gap**2 / 2)
        slope: Floats = (weights * (stats.logistic(z) - labels)) @ design + pull * gap
        return value, slope

    result: Floats = minimize(objective, start, jac=True, method="L-BFGS-B").x
    return result
