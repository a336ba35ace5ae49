"""Silence as an action: after the draft, a small head turns features of draft and context into the probability of showing it.

show | draft  ~  Bernoulli(e + (1 - e) * sigmoid(z)),   z = scale * (w . (f - mean) / sd + b)

e is the exploration floor: however sure the head is, every draft keeps a chance e to be shown, so that what silence would have cost stays
measurable (the reward of silence is known to be 0, that of showing only if it is shown). e = 0 serves at the cut, show iff z >= 0.
"""

import json
import math
import re

import msgspec
import numpy as np
import numpy.typing as npt

from keepgrad.errors import VersionError

FEATURES = (
    "first_max_logp",  # log-prob of the likeliest first token: a feature of the context alone, used for baseline buckets
    "first_entropy",  # nats
    "mean_logp",
    "sum_logp",
    "min_logp",
    "first_logp",
    "log_chars",
    "finished",  # the draft ends its line
    "line_start",  # nothing but indentation before the cursor
    "log_column",  # characters before the cursor on its line, log1p
    "after_open",  # the cursor follows ( [ { ,
    "after_dot",
    "after_equals",
    "words_known",  # share of the draft's words that stand in the prompt
    "seen_whole",  # the whole draft stands in the prompt
)
_WORD = re.compile(r"[A-Za-z_]\w+")


class Head(msgspec.Struct, frozen=True):
    """The silence head of a version; `always_show` is the base's. Lengths of mean, sd, w: len(FEATURES)."""

    mean: list[float]
    sd: list[float]
    w: list[float]
    b: float
    scale: float = 4.0
    always_show: bool = False
    prior_b: float = 0.0
    """b as the rewards alone would have it, before the coverage floor raised it."""

    def logit(self, features: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """z for features [N, F] or [F]."""
        f = (features - np.asarray(self.mean)) / np.asarray(self.sd)
        result: npt.NDArray[np.float64] = self.scale * (f @ np.asarray(self.w) + self.b)
        return result

    def show_probability(self, features: list[float], explore: float) -> float:
        """Probability with which a draft with these features is shown."""
        if self.always_show:
            return 1.0
        z = float(self.logit(np.asarray(features)))
        if explore == 0.0:
            return 1.0 if z >= 0 else 0.0
        return explore + (1 - explore) / (1 + math.exp(-max(min(z, 50.0), -50.0)))

    def to_bytes(self) -> bytes:
        """The head as it lies in a version (JSON)."""
        return json.dumps(msgspec.to_builtins(self), sort_keys=True).encode()


def always() -> Head:
    """The head that shows every draft."""
    n = len(FEATURES)
    return Head(mean=[0.0] * n, sd=[1.0] * n, w=[0.0] * n, b=0.0, always_show=True)


def from_bytes(data: bytes) -> Head:
    """Inverse of `Head.to_bytes`. Raises VersionError if it is no head of this release."""
    try:
        head = msgspec.json.decode(data, type=Head)
    except msgspec.MsgspecError as error:
        raise VersionError(f"the version's silence head cannot be read ({error}): roll back to another version") from error
    if len({len(head.mean), len(head.sd), len(head.w), len(FEATURES)}) > 1:
        raise VersionError(f"the version's silence head is not for these {len(FEATURES)} features: train a new one from the base")
    return head


def features(prompt: str, text: str, logps: list[float], first_max_logp: float, first_entropy: float, finished: bool) -> list[float]:
    """The inputs of the head, in the order of FEATURES; `logps` are at temperature 1, `prompt` is the prompt's decoded tail."""
    line = prompt.rsplit("\n", 1)[-1]
    last = line.rstrip()[-1:]
    words = _WORD.findall(text)
    known = set(_WORD.findall(prompt))
    return [
        first_max_logp,
        first_entropy,
        sum(logps) / max(len(logps), 1),
        sum(logps),
        min(logps, default=0.0),
        logps[0] if logps else 0.0,
        math.log1p(len(text)),
        float(finished),
        float(not line.strip()),
        math.log1p(len(line)),
        float(last in tuple("([{,")),
        float(last == "."),
        float(last == "="),
        sum(word in known for word in words) / max(len(words), 1),
        float(len(text) > 3 and text in prompt),
    ]
