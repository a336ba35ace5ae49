"""Health of a training step: the numbers of design section 7 and the alarms on them."""

import json
from collections.abc import Sequence
from typing import Any

import torch

from keepgrad.records import Sample
from keepgrad.train.loss import Policy

BANDS = {
    "ratio_mean": (0.5, 2.0),
    "ratio_sd": (0.0, 0.25),
    "ess": (0.3, 1.0),
    "kl": (-0.1, 0.1),
    "entropy_ratio": (0.6, float("inf")),
    "logp_drift": (0.0, 2.0),
    "self_similarity": (0.0, 0.85),
}
"""Name to (low, high): outside, the alarm `name` is raised. `kl` is per token, against the behaviour version."""


class Meter:
    """Running sums over the sampled tokens of a step."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(("n", "ratio", "ratio2", "over", "log_ratio", "abs_log_ratio", "entropy", "settled", "settled_n"), 0.0)
        self._drift = 0.0
        self._first: list[float] = []

    def settled(self, logp: torch.Tensor) -> None:
        """One micro-batch of settled lines: log-probs of their tokens."""
        self._sums["settled"] += float(logp.sum())
        self._sums["settled_n"] += logp.numel()

    def sampled(self, policy: Policy, entropy: torch.Tensor) -> None:
        """One micro-batch of drafts: ratios of their tokens, and entropies."""
        sums, ratio, log_ratio = self._sums, policy.ratio, policy.log_ratio
        sums["n"] += ratio.numel()
        sums["ratio"] += float(ratio.sum())
        sums["ratio2"] += float(ratio.square().sum())
        sums["over"] += float((ratio > 2.0).sum())
        sums["log_ratio"] += float(log_ratio.sum())
        sums["abs_log_ratio"] += float(log_ratio.abs().sum())
        sums["entropy"] += float(entropy.sum())
        self._first.append(float(entropy.mean()))
        self._drift = max(self._drift, float(log_ratio.abs().mean()))

    def dump(self) -> str:
        """State as JSON, for the checkpoint."""
        return json.dumps({"sums": self._sums, "drift": self._drift, "first": self._first})

    def restore(self, text: str) -> None:
        """Inverse of `dump`."""
        state = json.loads(text)
        self._sums, self._drift, self._first = state["sums"], state["drift"], state["first"]

    def summary(self, samples: Sequence[Sample], ratio_cap: float) -> dict[str, Any]:
        """Numbers by name, and under `alarms` the names outside their band."""
        sums = self._sums
        n = max(sums["n"], 1.0)
        mean = sums["ratio"] / n if sums["n"] else 1.0
        quarter = max(len(self._first) // 4, 1)
        before, after = sum(self._first[:quarter]) / quarter, sum(self._first[-quarter:]) / quarter
        numbers = {
            "ratio_mean": mean,
            "ratio_sd": max(sums["ratio2"] / n - mean * mean, 0.0) ** 0.5 if sums["n"] else 0.0,
            "ess": sums["ratio"] ** 2 / (n * sums["ratio2"]) if sums["ratio2"] else 1.0,
            "kl": -sums["log_ratio"] / n,
            "entropy": sums["entropy"] / n,
            "entropy_ratio": after / before if before > 0 else 1.0,
            "logp_drift": self._drift,
            "self_similarity": _repeats(samples),
        }
        alarms = [name for name, (low, high) in BANDS.items() if not low <= numbers[name] <= high]
        rest = {
            "truncated": sums["over"] / n,
            "settled_logp": sums["settled"] / max(sums["settled_n"], 1.0),
            "tokens": int(sums["n"]),
            "settled_tokens": int(sums["settled_n"]),
            "samples": len(samples),
            "ratio_cap": ratio_cap,
        }
        return {name: round(value, 5) for name, value in (numbers | rest).items()} | {"alarms": alarms}


def _repeats(samples: Sequence[Sample]) -> float:
    """Share of drafts whose exact tokens another draft of the window has too."""
    drafts = [tuple(sample.completion_ids) for sample in samples if len(sample.completion_ids) > 2]
    counts: dict[tuple[int, ...], int] = {}
    for draft in drafts:
        counts[draft] = counts.get(draft, 0) + 1
    return sum(count for count in counts.values() if count > 1) / max(len(drafts), 1)
