"""The verdict, an action after the draft: how much of it to show, if any, from the chance that it would be taken.

A draft of n tokens can be shown up to any of its cuts c_1 < ... < c_K = n, which are ends of words, or not at all. For each cut,

    q_k = sigma(w . (f_k - mean) / sd + b)      chance that the draft, shown up to c_k, would be taken
    v_k = q_k value(s_k) - tau                  its expected reward; s_k its characters other than blanks, value as in reward/terms.py

    cut         argmax v_k with probability 1 - e, any of the K with probability e / K each
    show | cut  ~  Bernoulli(e + (1 - e) sigma(scale (v - least)))

e is the exploration floor: however sure the head is, every draft keeps a chance to be shown, and every cut one to be tried, so that what
silence and cuts cost stays measurable (the reward of silence is known to be 0, that of showing only where something is shown). e = 0 serves
the best cut, iff v >= least.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from keepgrad import stats
from keepgrad.errors import VersionError
from keepgrad.words import ends_word

FILE = "verdict.json"
"""The head's file in a version."""
Floats = npt.NDArray[np.float64]
FEATURES = (
    "first_max_logp",  # log-prob of the likeliest first token: a feature of the context alone, used for baseline buckets
    "first_entropy",  # nats
    "mean_logp",
    "sum_logp",
    "min_logp",
    "first_logp",
    "log_size",  # characters other than blanks, log1p
    "finished",  # the draft ends its line, and is whole
    "line_start",  # nothing but indentation before the cursor
    "log_column",  # characters before the cursor on its line, log1p
    "after_open",  # the cursor follows ( [ { ,
    "after_dot",
    "after_equals",
    "words_known",  # share of the draft's words that stand in the prompt
    "seen_whole",  # all of it stands in the prompt
)
"""What the head sees of a draft up to one cut. The log-probs are at temperature 1."""
SIZE = FEATURES.index("log_size")
_WORD = re.compile(r"[A-Za-z_]\w+")


class Verdict(NamedTuple):
    """What was drawn: which of the cuts, whether it is shown, the log-prob of that (silence is one action, whatever the cut), and the
    probability with which this cut is shown once it is chosen."""

    which: int
    shown: bool
    logprob: float
    show_probability: float


NOTHING = Verdict(0, False, 0.0, 0.0)
"""The only verdict on a blank draft."""


class Head(msgspec.Struct, frozen=True):
    """The verdict head of a version; `always_show` is the base's: the whole draft, always. Lengths of mean, sd, w: len(FEATURES)."""

    mean: list[float]
    sd: list[float]
    w: list[float]
    b: float
    least: float = 0.0
    """Least expected reward that is shown; below 0 where the coverage floor asks for more than pays."""
    tau: float = 0.0
    size_gain: float = 0.0
    size_typical: float = 1.0
    """The reward spec it was fitted to."""
    taken: list[float] = []
    """Log-odds that what is right is taken: weights of log_size and finished, and a constant (train/head.py)."""
    scale: float = 30.0
    always_show: bool = False
    whole: bool = False
    """Drafts are not cut."""

    def chance(self, features: Floats) -> Floats:
        """q for features [N, F] or [F]."""
        f = (features - np.asarray(self.mean)) / np.asarray(self.sd)
        result: Floats = stats.logistic(f @ np.asarray(self.w) + self.b)
        return result

    def worth(self, features: Floats) -> Floats:
        """v for features [N, F] or [F]; infinite for the base's head."""
        if self.always_show:
            return np.full(features.shape[:-1], math.inf)
        size = np.expm1(features[..., SIZE])
        result: Floats = self.chance(features) * stats.saturating(size, self.size_gain, self.size_typical) - self.tau
        return result

    def best(self, features: Floats) -> tuple[int, float]:
        """The best cut of a draft with features [K, F], and its worth; the base's is the whole draft."""
        worth = self.worth(features)
        index = self._pick(worth)
        return index, float(worth[index])

    def verdict(self, features: Sequence[Sequence[float]], explore: float, cut_luck: float, show_luck: float) -> Verdict:
        """Draw a verdict for a draft with features [K, F], K > 0; the two lucks are uniform in [0, 1)."""
        count = len(features)
        rows = np.asarray(features, dtype=np.float64)
        worth = self.worth(rows)
        best = self._pick(worth)
        elsewhere = 0.0 if self.whole else explore
        cuts = np.full(count, elsewhere / count)
        cuts[best] += 1 - elsewhere
        index = min(int(np.searchsorted(cuts.cumsum(), cut_luck, side="right")), count - 1) if elsewhere else best
        z = worth - self.least
        show = explore + (1 - explore) * stats.logistic(self.scale * z) if explore else (z >= 0).astype(np.float64)
        shown = bool(show_luck < show[index])
        chance = float(cuts[index] * show[index]) if shown else float(cuts @ (1 - show))
        return Verdict(index, shown, math.log(chance), float(show[index]))

    def _pick(self, worth: Floats) -> int:
        return len(worth) - 1 if self.always_show or self.whole else int(worth.argmax())

    def to_bytes(self) -> bytes:
        """The head as it lies in a version (JSON)."""
        return json.dumps(msgspec.to_builtins(self), sort_keys=True).encode()


def always() -> Head:
    """The head that shows every draft whole."""
    n = len(FEATURES)
    return Head(mean=[0.0] * n, sd=[1.0] * n, w=[0.0] * n, b=0.0, always_show=True)


def from_bytes(data: bytes) -> Head:
    """Inverse of `Head.to_bytes`. Raises VersionError if it is no head of this release."""
    try:
        head = msgspec.json.decode(data, type=Head)
    except msgspec.MsgspecError as error:
        raise VersionError(f"the version's verdict head cannot be read ({error}): roll back to another version") from error
    if len({len(head.mean), len(head.sd), len(head.w), len(FEATURES)}) > 1:
        raise VersionError(f"the version's verdict head is not for these {len(FEATURES)} features: train a new one from the base")
    return head


def cuts(texts: Sequence[str]) -> list[int]:
    """The cuts of a draft, in tokens, ascending: where what stands there by then is something and ends where a word ends.

    `texts[j]` is what the developer would see of the first j + 1 tokens. The last cut is the whole draft; none if that is blank. Of tokens
    that add nothing to see (a line end) the last counts.
    """
    whole = texts[-1] if texts else ""
    found = {}
    for tokens, text in enumerate(texts, 1):
        if text.strip() and whole.startswith(text) and ends_word(whole, len(text)):
            found[text] = tokens
    return sorted(found.values())


def features(prompt: str, text: str, logps: Sequence[float], first_max_logp: float, first_entropy: float, finished: bool) -> list[float]:
    """The inputs of the head, in the order of FEATURES, of a draft up to one cut: its text and the log-probs of its tokens at temperature
    1. `prompt` is the prompt's decoded tail."""
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
        math.log1p(sum(not character.isspace() for character in text)),
        float(finished),
        float(not line.strip()),
        math.log1p(len(line)),
        float(last in tuple("([{,")),
        float(last == "."),
        float(last == "="),
        sum(word in known for word in words) / max(len(words), 1),
        float(len(text) > 3 and text in prompt),
    ]
