"""The terms of the Tab reward: pure functions of an outcome. Each closes exploits, which tests/exploits/test_tab.py shows paying first.

    accept   a - tau            closes "show everything", each showing costs tau, and "silence everywhere", silence earns 0 and never more,
                                whereas what is taken more often than tau earns more than 0
    size     a (value(k) - 1)   closes "tiny suggestions", one character is worth little, and "very long suggestions", value is bounded,
                                blanks do not count, and a is the share taken, so what nobody takes costs

with a the share taken and k the characters taken other than blanks. Their sum is a value(k) - tau, or 0 for silence.

Real Copilot telemetry (CUPS, Mozannar et al. 2024) agrees that small is not better: of suggestions of up to 10 characters one in ten was
accepted, of those above 40 one in two.
"""

from keepgrad import stats
from keepgrad.records import Generation, Outcome
from keepgrad.reward.spec import Spec


def taken_share(outcome: Outcome) -> float:
    """a: the share of the suggestion's characters that the developer took, in [0, 1]."""
    if outcome.end in ("accepted", "typed_through"):
        return 1.0
    if outcome.end != "partial" or not outcome.shown_chars:
        return 0.0
    return min(max(outcome.accepted_chars / outcome.shown_chars, 0.0), 1.0)


def taken_size(generation: Generation, outcome: Outcome) -> int:
    """k: the characters taken, blanks left out, so that padding is worth nothing."""
    return sum(not character.isspace() for character in generation.text[: max(outcome.accepted_chars, 0)])


def value(size: float, spec: Spec) -> float:
    """What taking `size` characters is worth: (1 + gain) k / (k + gain typical); 0 at 0, 1 at `size_typical`, below 1 + gain always."""
    return float(stats.saturating(size, spec.size_gain, spec.size_typical))


def accept(outcome: Outcome, spec: Spec) -> float:
    """a - tau for what was shown, 0 for silence."""
    return 0.0 if outcome.end == "abstained" else taken_share(outcome) - spec.tau


def size(generation: Generation, outcome: Outcome, spec: Spec) -> float:
    """a (value(k) - 1): nothing at a typical size, down to -a for a trifle, up to a gain for a long one."""
    share = taken_share(outcome)
    return share * (value(taken_size(generation, outcome), spec) - 1) if share else 0.0


def all_terms(generation: Generation, outcome: Outcome, spec: Spec) -> dict[str, float]:
    """Every term by name; the reward is their sum. `outcome` is observed and was drawn, or abstained."""
    return {"accept": accept(outcome, spec), "size": size(generation, outcome, spec)}
