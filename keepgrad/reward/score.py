"""Scores and samples: where each generation lies in the books (P1), its reward, and from the rewarded ones what the trainer eats.

The action is the draft's tokens, then one verdict. With r the reward and b a baseline, the advantages are

    draft tokens    r - b up to the cut that was shown; 0 behind it and of the silent, for nobody judged what nobody saw
    verdict         r: what silence would have earned is known without trying it, 0, and that is the exact baseline of a choice of two

never divided by a standard deviation: that would weigh easy contexts like hard ones (Liu et al. 2025, "Understanding R1-Zero-like
training").

Baselines are leave-one-out, so that b does not depend on its own r, and may depend on the context only, so that the gradient of the draft's
tokens stays unbiased (Williams 1992): features[0] is the log-prob of the likeliest first token, fixed before anything is sampled. They are
means over what was shown, weighted like the batch, so that a flood of one user moves them no more than the batch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from keepgrad.config import Train
from keepgrad.errors import ConfigError, TrainError
from keepgrad.policy.prompt import Prompter
from keepgrad.policy.verdict import FEATURES
from keepgrad.records import Generation, Outcome, Place, Sample, Score, Tokens
from keepgrad.redact import PLACEHOLDER
from keepgrad.reward import terms
from keepgrad.reward.spec import Spec
from keepgrad.words import ends_word

Floats = npt.NDArray[np.float64]
Scored = tuple[Generation, Tokens, Outcome, Score]
BUCKETS = 8
"""Quantile buckets of the context feature, for the `bucket` baseline."""
CONTEXT = ("first_max_logp", "first_entropy", "line_start", "log_column", "after_open", "after_dot", "after_equals")
"""Features of the context alone: only these may enter the `value` baseline, for the others depend on the draft."""
_COLUMNS = [FEATURES.index(name) for name in CONTEXT]
_RIDGE = 1.0
"""Penalty of the `value` baseline on standardised features, in rewards: as if one more sample said "no effect"."""


def score(generation: Generation, outcome: Outcome, spec: Spec) -> Score:
    """The place of one generation and, if that is `rewarded`, its reward by term. Pure; raises nothing."""
    if generation.consent != "code":
        return _unrewarded(generation, "excluded", "consent", spec, outcome.events)
    if outcome.state == "pending":
        return _unrewarded(generation, "pending", outcome.reason, spec, outcome.events)
    if outcome.state == "censored":
        return _unrewarded(generation, "censored", outcome.reason, spec, outcome.events)
    if outcome.end == "not_drawn":
        return _unrewarded(generation, "excluded", "not_drawn", spec, outcome.events)
    by_term = terms.all_terms(generation, outcome, spec)
    return Score(generation.id, "rewarded", outcome.reason, sum(by_term.values()), by_term, spec.hash, outcome.events)


def samples(scored: Sequence[Scored], spec: Spec, train: Train, prompter: Prompter) -> list[Sample]:
    """One sample per rewarded generation, in the order given; the others are left out.

    `prompter` is that of the model that drafted. Raises TrainError if token arrays do not fit their generation (P2) or a
    feature is not a number, ConfigError for an unknown `train.baseline`.
    """
    kept = [row for row in scored if row[3].place == "rewarded"]
    if not kept:
        return []
    for generation, tokens, outcome, found in kept:
        _check(generation, tokens, outcome, found)
    users = user_weights(Counter(generation.user for generation, *_ in kept), min(spec.user_cap, train.user_cap))
    weights = np.array([users[generation.user] for generation, *_ in kept])
    shown = np.array([outcome.end != "abstained" for _, _, outcome, _ in kept])
    rewards = np.array([found.reward for *_, found in kept])
    features = _context_features([tokens for _, tokens, _, _ in kept])
    buckets = bucket_of(features, shown)
    advantages = np.where(shown, rewards - baselines(train.baseline, rewards, features, buckets, shown, weights), 0.0)
    return [
        _sample(row, float(advantages[at]), float(weights[at]), int(buckets[at]), settled_ids(row, spec, prompter), right(row, prompter))
        for at, row in enumerate(kept)
    ]


def user_weights(counts: Mapping[str, int], cap: float) -> dict[str, float]:
    """Weight per sample of each user, at most 1, so that no user has more than `cap` of the batch's weight (P8).

    Who would have more is brought down to exactly that share, the others keep 1. With fewer than 1 / cap users no such weights exist: then
    the cap is an equal share, 1 / users.
    """
    if not counts:
        return {}
    cap = max(cap, 1 / len(counts))
    sizes = sorted(counts.values(), reverse=True)
    most = float(sizes[0])
    for capped in range(len(sizes)):  # the `capped` largest users get T each, the rest all they have: T = cap (capped T + rest)
        free = 1 - capped * cap
        most = cap * sum(sizes[capped:]) / free if free > 1e-12 else float(sizes[-1])
        if sizes[capped] <= most * (1 + 1e-12):
            break
    return {user: min(1.0, most / count) for user, count in counts.items()}


def bucket_of(features: Floats, shown: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Bucket, 0 to BUCKETS - 1, of each row by quantiles of features[0] over the shown; all 0 without features. (N, F), (N,) to (N,)."""
    if not features.shape[1] or not shown.any():
        return np.zeros(len(features), dtype=np.int64)
    edges = np.quantile(features[shown, 0], np.linspace(0, 1, BUCKETS + 1)[1:-1])
    return np.searchsorted(edges, features[:, 0], side="right").astype(np.int64)


def baselines(
    kind: str, rewards: Floats, features: Floats, buckets: npt.NDArray[np.int64], shown: npt.NDArray[np.bool_], weights: Floats
) -> Floats:
    """Leave-one-out baseline of each shown row, 0 for the others; all (N,). `kind`: bucket, mean or value. Raises ConfigError otherwise."""
    result = np.zeros(len(rewards))
    if kind == "mean":
        result[shown] = _leave_one_out(rewards[shown], weights[shown], np.zeros(int(shown.sum()), dtype=np.int64))
    elif kind == "bucket":
        result[shown] = _leave_one_out(rewards[shown], weights[shown], buckets[shown])
    elif kind == "value":
        context = features[:, [at for at in _COLUMNS if at < features.shape[1]]]
        result[shown] = _fitted(rewards[shown], context[shown], weights[shown])
    else:
        raise ConfigError(f"train.baseline is {kind!r}: choose bucket, mean or value")
    return result


def settled_ids(row: Scored, spec: Spec, prompter: Prompter) -> list[int]:
    """Ids of the line the developer ended up with, its newline included, as a continuation of the prompt; empty if not known.

    A healed prompt leaves the space before the cursor to its continuation, so the line starts with it.
    """
    generation, _, outcome, _ = row
    line = _settled_line(outcome)
    if not line or len(line) > spec.settled_chars:
        return []
    return prompter.encode_text((" " if generation.healed else "") + line + "\n")


def right(row: Scored, prompter: Prompter) -> list[bool]:
    """Of each cut, whether the line the developer ended up with starts with the draft up to it; empty if that line is not known.

    What the developer wrote instead judges every cut of a draft, also those that were not shown.
    """
    generation, tokens, outcome, _ = row
    line = _settled_line(outcome)
    if not line:
        return []
    return [fits(prompter.clean(tokens.completion_ids[:cut], generation.healed), line) for cut in tokens.cuts]


def _settled_line(outcome: Outcome) -> str:
    """The line the developer ended up with; empty if it is not known, or not to be learned from."""
    line = outcome.settled_text.split("\n", 1)[0].rstrip()
    return "" if outcome.end == "abstained" or PLACEHOLDER in line else line


def fits(text: str, line: str) -> bool:
    """Whether the line starts with the text, which ends where one of its words ends; blanks at their ends aside."""
    text, line = text.rstrip(), line.rstrip()
    return bool(text) and line.startswith(text) and ends_word(line, len(text))


def _unrewarded(generation: Generation, place: Place, reason: str, spec: Spec, events: int) -> Score:
    return Score(generation.id, place, reason, 0.0, {}, spec.hash, events)


def _check(generation: Generation, tokens: Tokens, outcome: Outcome, found: Score) -> None:
    name = generation.id
    if {tokens.generation, outcome.generation, found.generation} != {name}:
        raise TrainError(f"generation {name} was paired with the tokens, outcome or score of another: join them by generation id")
    if not len(tokens.completion_ids) == len(tokens.logprobs) == generation.completion_tokens:
        raise TrainError(
            f"generation {name} has {len(tokens.completion_ids)} token ids, {len(tokens.logprobs)} log-probs and was served with "
            f"{generation.completion_tokens} tokens: nothing is padded or guessed; run `keepgrad audit`"
        )
    if generation.cut not in (tokens.cuts or [0]) or len(tokens.features) != len(tokens.cuts):
        raise TrainError(
            f"generation {name} was cut at {generation.cut} of its cuts {tokens.cuts} and has {len(tokens.features)} rows of features, one "
            "for each cut is wanted: another release served it, or its record is damaged; run `keepgrad audit`"
        )


def _context_features(rows: Sequence[Tokens]) -> Floats:
    """(N, F): the first cut's features, of which those of the context are the same at every cut; 0 for a blank draft, which has no cut.

    Raises TrainError if their numbers differ or a value is not finite.
    """
    lengths = {len(cut) for row in rows for cut in row.features}
    if len(lengths) > 1:
        raise TrainError(f"samples of one batch have {sorted(lengths)} features: train on generations of one release only")
    result = np.zeros((len(rows), max(lengths, default=0)))
    for at, row in enumerate(rows):
        if row.features:
            result[at] = row.features[0]
    odd = np.flatnonzero(~np.isfinite(result).all(axis=1))
    if len(odd):
        raise TrainError(f"generation {rows[odd[0]].generation} has a feature that is not a number: the engine that served it is at fault")
    return result


def _leave_one_out(rewards: Floats, weights: Floats, groups: npt.NDArray[np.int64]) -> Floats:
    """Weighted mean of the others of the same group; of all others where the group has no other; 0 for the only one there is."""
    count = int(groups.max()) + 1 if len(groups) else 0
    total, mass, size = (np.bincount(groups, part, count) for part in (weights * rewards, weights, np.ones(len(groups))))
    lone = size[groups] < 2
    everywhere = weights.sum() - weights
    fallback = np.divide((weights * rewards).sum() - weights * rewards, everywhere, out=np.zeros_like(rewards), where=len(rewards) > 1)
    rest = np.where(lone, 1.0, mass[groups] - weights)
    result: Floats = np.where(lone, fallback, (total[groups] - weights * rewards) / rest)
    return result


def _fitted(rewards: Floats, features: Floats, weights: Floats) -> Floats:
    """Weighted ridge regression of reward on features with a free intercept; each prediction as if its own row had been left out.

    With H the hat matrix, prediction without row i is (yhat_i - h_ii y_i) / (1 - h_ii) (Allen 1974, PRESS), exactly, without n fits.
    """
    if len(rewards) < 2:
        return np.zeros(len(rewards))
    spread = features.std(0)
    useful = spread > 1e-12
    scaled = (features[:, useful] - features[:, useful].mean(0)) / spread[useful]
    design = np.column_stack([np.ones(len(rewards)), scaled])
    penalty = np.diag([0.0, *[_RIDGE] * scaled.shape[1]])
    weighted = design * weights[:, None]
    solved = np.linalg.solve(design.T @ weighted + penalty, weighted.T)
    leverage = np.einsum("ij,ji->i", design, solved)
    result: Floats = (design @ (solved @ rewards) - leverage * rewards) / np.maximum(1 - leverage, 1e-9)
    return result


def _sample(row: Scored, advantage: float, weight: float, bucket: int, settled: list[int], right: list[bool]) -> Sample:
    generation, tokens, outcome, found = row
    unseen = len(tokens.completion_ids) - generation.cut
    return Sample(
        generation=generation.id,
        version=generation.version,
        prompt_ids=tokens.prompt_ids,
        completion_ids=tokens.completion_ids,
        logprobs=tokens.logprobs,
        cuts=tokens.cuts,
        features=tokens.features,
        cut=generation.cut,
        right=right,
        shown=outcome.end != "abstained",
        taken=terms.taken_share(outcome),
        verdict_logprob=generation.verdict_logprob,
        reward=found.reward,
        advantages=[advantage] * generation.cut + [0.0] * unseen + [found.reward],
        settled_ids=settled,
        weight=weight,
        bucket=bucket,
    )
