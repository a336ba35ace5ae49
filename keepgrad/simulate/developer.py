"""A simulated developer: wants the text that really stands in the file, and treats a suggestion accordingly.

These developers are a stand-in for people. They are good for exercising the whole loop and for comparing two policies under identical
behaviour; they are no evidence that people would behave so. Their rates are calibrated on published telemetry where it says something
(simulate/calibrate.py prints both beside each other) and stated assumptions elsewhere.

`decide` is a pure function. Its randomness is a table of uniforms named by purpose and keyed by (seed, developer, opportunity), so the same
opportunity gets the same luck under every policy (common random numbers), and one draw more or fewer shifts no other draw.
"""

import hashlib
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Literal

import msgspec

from keepgrad.words import ends_word

End = Literal["accepted", "partial", "typed_through", "rejected", "ignored"]
Fit = Literal["whole", "start", "near", "wrong"]

HORIZONS_S = (15, 30, 120, 300, 600)
"""Check points of accepted text, in seconds (the Copilot client's; see calibrate.py)."""

_NORMAL = NormalDist()
_NEAR = 0.7
"""Least share of a suggestion's characters that must be usable, from its start, for it to be nearly right."""
_REWORK_AT = (0.19, 0.05, 0.03, 0.09, 0.07)
"""Chance that right text is first reworked before each of HORIZONS_S, given it was not before."""
_REWORK_MEAN = 0.2
"""Mean relative edit distance of one rework."""


class Draws:
    """Uniform numbers by name, keyed by (seed, developer, opportunity); asking twice gives the same number.

    >>> Draws(0, "dev-3", "argparse.py:1042").uniform("end")
    """

    def __init__(self, seed: int, developer: str, opportunity: str | int) -> None:
        self._key = f"{seed}\0{developer}\0{opportunity}\0".encode()

    def uniform(self, name: str) -> float:
        """In [0, 1)."""
        return int.from_bytes(hashlib.blake2b(self._key + name.encode(), digest_size=8).digest(), "big") / 2**64

    def normal(self, name: str) -> float:
        """Standard normal."""
        return _NORMAL.inv_cdf(min(max(self.uniform(name), 1e-9), 1 - 1e-9))

    def exponential(self, name: str) -> float:
        """Mean 1."""
        return -math.log1p(-min(self.uniform(name), 1 - 1e-12))


class Temperament(msgspec.Struct, frozen=True):
    """What differs between developers. Made by `temperament`, eaten by `decide` and the fleet.

    >>> Temperament(eager=0.3, careless=0.01, escapes=0.4, reworks=1.1, speed=1.0, typing_cps=5.5, pause_s=2.2, cancels=0.04, closes=0.02)
    """

    eager: float = 0.0
    """Shift of the log-odds of taking a usable suggestion."""
    careless: float = 0.02
    """Chance of taking a wrong suggestion, undone soon after."""
    escapes: float = 0.4
    """Share of wrong suggestions dismissed with Esc; the others are typed over or left to expire."""
    reworks: float = 1.0
    """Factor on the chance that right text is reworked later."""
    speed: float = 1.0
    """Factor on the time to decide."""
    typing_cps: float = 5.0
    """Characters typed per second."""
    pause_s: float = 2.0
    """Median pause before an opportunity."""
    cancels: float = 0.04
    """Chance that a request is cancelled before its answer can be drawn."""
    closes: float = 0.02
    """Chance that the editor closes while a suggestion stands there."""


class Decision(msgspec.Struct, frozen=True):
    """What the developer did with one shown suggestion. Made by `decide`, eaten by the fleet, the evaluation and calibration.

    `chars`: characters of the suggestion that were taken (all for accepted and typed_through). `after_s`: from shown to this end.
    `survival`: horizon to relative edit distance of the taken text, empty if nothing was taken with a key. `undone`: it was taken back.

    >>> Decision(end="accepted", fit="whole", chars=5, reason="", after_s=1.9, survival={15: 0.0, 30: 0.0, 120: 0.2, 300: 0.2, 600: 0.2})
    """

    end: End
    fit: Fit
    chars: int
    reason: str
    after_s: float
    survival: dict[int, float] = {}
    undone: bool = False

    @property
    def taken(self) -> bool:
        """Whether it counts as accepted (in whole, in part, or by typing it out)."""
        return self.end in ("accepted", "partial", "typed_through")


def temperament(seed: int, developer: str) -> Temperament:
    """The developer's temperament: sampled once per (seed, developer)."""
    draws = Draws(seed, developer, "temperament")

    def spread(name: str, median: float, sigma: float, top: float = math.inf) -> float:
        return min(median * math.exp(sigma * draws.normal(name)), top)

    return Temperament(
        eager=0.8 * draws.normal("eager"),
        careless=spread("careless", 0.015, 0.6, 0.08),
        escapes=1 / (1 + math.exp(0.4 - 0.8 * draws.normal("escapes"))),
        reworks=spread("reworks", 0.9, 0.45, 2.5),
        speed=spread("speed", 1.0, 0.35),
        typing_cps=spread("typing", 4.5, 0.3, 12.0),
        pause_s=spread("pause", 1.6, 0.4),
        cancels=spread("cancels", 0.04, 0.5, 0.2),
        closes=spread("closes", 0.012, 0.6, 0.1),
    )


def decide(text: str, truth: str, temperament: Temperament, draws: Draws) -> Decision:
    """What the developer does with the shown suggestion `text` where the line goes on with `truth` (its first line counts).

    One uniform decides the end, the outcomes in order of how much of the suggestion is kept: under the same luck, the right line (of 12
    characters or more) is taken wherever another suggestion for it was. Raises ValueError for an empty text, which is never shown.
    """
    if not text:
        raise ValueError("an empty suggestion is never shown: decide() needs at least one character")
    wanted = truth.split("\n", 1)[0]
    fit, usable = fit_of(text, wanted)
    luck = draws.uniform("end")
    for end, chance in _chances(text, wanted, fit, usable, temperament):
        if luck < chance:
            return _finish(end, fit, len(text) if end != "partial" else usable, text, wanted, temperament, draws)
        luck -= chance
    return _dismissed(fit, usable, temperament, draws)


def fit_of(text: str, wanted: str) -> tuple[Fit, int]:
    """How the suggestion fits the line the developer wants, and how many of its first characters are usable (cut back to a whole word).

    `whole`: all of the rest of the line, trailing blanks aside. `start`: right as far as it goes, ending at a token boundary.
    `near`: a share of at least 0.7 is usable. `wrong`: anything else.
    """
    if text.rstrip() == wanted.rstrip():
        return ("whole", len(text)) if text.strip() else ("wrong", 0)
    same = next((at for at, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b), min(len(text), len(wanted)))
    if same >= len(text.rstrip()) and text.strip() and ends_word(wanted, len(text.rstrip())):
        return "start", len(text)
    while same and not (ends_word(wanted, same) and ends_word(text, same)):
        same -= 1
    usable = same if text[:same].strip() else 0
    return ("near" if usable >= _NEAR * len(text) else "wrong"), usable


def _chances(text: str, wanted: str, fit: Fit, usable: int, who: Temperament) -> list[tuple[End, float]]:
    """Chance of each way to take the suggestion, in order; what is left over dismisses it."""
    worth = 1 - math.exp(-((usable / 6) ** 2))  # a press of Tab hardly pays for three characters
    if fit in ("whole", "start"):
        part = 1.0 if fit == "whole" else 0.6 + 0.4 * usable / max(len(wanted), 1)
        accepted = _shift(0.93 * worth * part, who.eager)
        return [("accepted", accepted), ("typed_through", (1 - accepted) * 0.45)]
    alike = similarity(text, wanted[: len(text) + 4])
    fix = 0.45 * max(alike - 0.6, 0) / 0.4 if len(text) >= 5 else 0.0
    share = usable / len(text)
    part = worth * (0.35 if fit == "near" else 0.25 * share)
    return [("accepted", min(_shift(fix, who.eager) + who.careless, 1)), ("partial", _shift(part, who.eager) * (1 - fix))]


def _shift(chance: float, log_odds: float) -> float:
    return chance if chance in (0.0, 1.0) else 1 / (1 + (1 - chance) / chance * math.exp(-log_odds))


def _finish(end: End, fit: Fit, chars: int, text: str, wanted: str, who: Temperament, draws: Draws) -> Decision:
    if end == "typed_through":
        return Decision(end, fit, chars, "", chars / who.typing_cps)
    after_s = who.speed * 1.86 * math.exp(1.1 * draws.normal("accept_s"))
    taken = text[:chars]
    wrong = 0.0 if end == "partial" or fit in ("whole", "start") else distance(taken, wanted) / len(taken)
    undone = wrong > 0.6 or draws.uniform("undo") < 0.01
    return Decision(end, fit, chars, "", after_s, _survival(min(wrong, 1.0), undone, who, draws), undone)


def _survival(wrong: float, undone: bool, who: Temperament, draws: Draws) -> dict[int, float]:
    """Relative edit distance of the taken text at each horizon: undone, corrected where it was wrong, and reworked on second thoughts."""
    corrected_s, undone_s = 15 * draws.exponential("correct_s"), 10 * draws.exponential("undo_s")
    extent = -math.log1p(-min(draws.uniform("extent"), 0.999)) * _REWORK_MEAN
    again, still, luck = draws.uniform("again"), 1.0, draws.uniform("rework")
    reworked, changes = 0.0, {}
    for horizon, chance in zip(HORIZONS_S, _REWORK_AT, strict=True):
        still *= 1 - min(chance * who.reworks, 0.9)
        if luck > still:  # happened by now; later horizons see a second change now and then
            reworked = max(reworked, extent) if horizon < 300 or again > 0.2 else extent * 1.6
        now = 1.0 if undone and undone_s < horizon else max(wrong if corrected_s < horizon else 0.0, reworked)
        changes[horizon] = round(min(now, 1.0), 3)
    return changes


def _dismissed(fit: Fit, usable: int, who: Temperament, draws: Draws) -> Decision:
    after_s = who.speed * 2.3 * math.exp(1.4 * draws.normal("dismiss_s"))
    luck = draws.uniform("dismiss")
    if fit in ("whole", "start"):  # right, yet not taken: overtaken by their own typing, or not seen
        return Decision("ignored", fit, 0, "superseded" if luck < 0.7 else "expired", after_s if luck < 0.7 else 10 + after_s)
    if luck < who.escapes:
        return Decision("rejected", fit, 0, "", after_s)
    if luck < who.escapes + (1 - who.escapes) * 0.8:
        return Decision("ignored", fit, 0, "typing_disagreed", after_s + usable / who.typing_cps)
    return Decision("ignored", fit, 0, "superseded" if luck < who.escapes + (1 - who.escapes) * 0.9 else "expired", 2 + after_s)


def similarity(text: str, wanted: str) -> float:
    """1 minus the edit distance over the longer length."""
    return 1 - distance(text, wanted) / max(len(text), len(wanted), 1)


def distance(a: str, b: str) -> int:
    """Levenshtein distance in characters."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


Decide = Callable[[str, str, Temperament, Draws], Decision]
"""Type of `decide`, for whoever takes the developer as an argument."""
