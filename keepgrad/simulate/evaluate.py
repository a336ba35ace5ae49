"""Before and after on code nobody trained on: base, best filters without learning, and learned policy, on the same contexts, seeds and
developers.

Six questions, each a paired change with a 95 % interval by file:
  change           base that always shows  ->  the learned policy as served
  over_filter      best confidence filter without any learning, at the learner's number shown  ->  the learned policy
  over_cut_filter  that filter, which also ends a draft before its first unlikely token  ->  the learned policy
  text_gain        base text  ->  learned text, both shown whole and always: what the adapter does
  silence_gain     base text always  ->  base text where the learned head shows, whole, at the same number shown: what silence does
  cut_gain         that  ->  the same, up to the cut that the learned head chose: what cutting does
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from keepgrad import metrics
from keepgrad.config import Config
from keepgrad.metrics import Judged
from keepgrad.policy import verdict
from keepgrad.policy.client import EngineClient
from keepgrad.policy.prompt import Prompter
from keepgrad.policy.versions import Store
from keepgrad.records import Draft, Sampling
from keepgrad.release import suite
from keepgrad.release.suite import Context
from keepgrad.simulate import corpus, developer

FILTERS = ("first_max_logp", "mean_logp", "sum_logp", "min_logp")
"""The confidences a filter without learning may rank by; compared with is the one with the best accept rate on these very contexts."""
UNLIKELY = (-0.5, -1.0, -1.5, -2.0, -3.0)
"""Log-probs below which a filter may end a draft; compared with is the one with the most accepted characters on these very contexts."""
_FEWEST = 4
"""Characters that such a filter leaves standing."""
_DEVELOPERS = 24

Bools = npt.NDArray[np.bool_]


def judge(contexts: Sequence[Context], texts: Sequence[str], shown: Bools, seed: int) -> list[Judged]:
    """What the simulated developers make of texts of which those in `shown` are drawn; the same developer and luck per context always."""
    judged = []
    for context, text, draw in zip(contexts, texts, shown.tolist(), strict=True):
        taken, chars = False, 0
        if draw:
            name = f"judge-{int.from_bytes(hashlib.sha256(context.id.encode()).digest()[:4], 'big') % _DEVELOPERS}"
            draws = developer.Draws(seed, name, context.id)
            decision = developer.decide(text, context.truth, developer.temperament(seed, name), draws)
            taken, chars = decision.taken, decision.chars if decision.taken else 0
        judged.append(Judged(context.id, context.file, bool(draw), taken, chars, len(text) if draw else 0))
    return judged


def compare(
    contexts: Sequence[Context], base: Sequence[Draft], final: Sequence[Draft], head: verdict.Head, prompter: Prompter, seed: int
) -> dict[str, Any]:
    """The six comparisons for drafts of the base and the final version on the same contexts; keys as the report names them."""

    def text(at: int, draft: Draft, cut: int) -> str:
        return prompter.clean(draft.completion_ids[:cut], contexts[at].prefix.endswith(" "))

    def whole(drafts: Sequence[Draft]) -> list[str]:
        return [text(at, draft, draft.cuts[-1] if draft.cuts else 0) for at, draft in enumerate(drafts)]

    always, served = _drawable(base), np.array([draft.verdict == "show" for draft in final])
    drafted, count = whole(base), int(served.sum())
    before, after = judge(contexts, drafted, always, seed), judge(contexts, [draft.text for draft in final], served, seed)
    features = _features(base)
    most = {name: _top([row[-1][verdict.FEATURES.index(name)] for row in features], always, count) for name in FILTERS}
    filters = {name: judge(contexts, drafted, most[name], seed) for name in FILTERS}
    best = max(filters, key=lambda name: metrics.summary(filters[name])["accept_rate"] or 0.0)
    ended = {limit: [text(at, draft, _likely(draft, limit)) for at, draft in enumerate(base)] for limit in UNLIKELY}
    cut_filters = {limit: judge(contexts, texts, most[best], seed) for limit, texts in ended.items()}
    limit = max(cut_filters, key=lambda limit: metrics.summary(cut_filters[limit])["accepted_chars"])
    chosen = [head.best(row) for row in features]
    quiet = _top([worth for _, worth in chosen], always, count)
    silenced = judge(contexts, drafted, quiet, seed)
    cut = [text(at, draft, draft.cuts[chosen[at][0]] if draft.cuts else 0) for at, draft in enumerate(base)]
    return {
        **metrics.change(before, after, seed),
        "before": metrics.summary(before),
        "after": metrics.summary(after),
        "filter": {
            "on": best,
            **_against(before, filters[best], seed),
            "accept_rate_by_filter": {name: metrics.summary(judged)["accept_rate"] for name, judged in filters.items()},
        },
        "cut_filter": {"on": best, "below": limit, **_against(before, cut_filters[limit], seed)},
        "over_filter": metrics.change(filters[best], after, seed),
        "over_cut_filter": metrics.change(cut_filters[limit], after, seed),
        "text_gain": metrics.change(before, judge(contexts, whole(final), _drawable(final), seed), seed),
        "silence_gain": metrics.change(before, silenced, seed),
        "cut_gain": metrics.change(silenced, judge(contexts, cut, quiet, seed), seed),
    }


async def evaluate(config: Config, engine: EngineClient, base: str, final: str, heldout: int, projects: int, seed: int) -> dict[str, Any]:
    """{"heldout": ..., "projects": ...}: `compare` on held-out files of known projects and on projects never trained on.

    `heldout` and `projects` are numbers of contexts. Raises EngineError if the engine stays away.
    """
    store, prompter = Store(config.root), Prompter(Path((await engine.status())["folder"]))
    head = verdict.from_bytes((store.path(final) / verdict.FILE).read_bytes())
    sampling = Sampling(temperature=config.model.temperature, max_tokens=config.model.max_tokens, explore=False)
    result: dict[str, Any] = {}
    sizes: tuple[tuple[corpus.Split, int], ...] = (("heldout", heldout), ("projects", projects))
    for split, count in sizes:
        contexts = suite.cut(corpus.files(split), count, seed)
        drafts = await suite.draft(engine, prompter, contexts, [base, final], sampling, seed, context_tokens=config.model.context_tokens)
        result[split] = compare(contexts, drafts[base], drafts[final], head, prompter, seed)
    return result


def _against(before: Sequence[Judged], after: Sequence[Judged], seed: int) -> dict[str, Any]:
    """A policy's summary, and its change from the base."""
    changes = metrics.change(before, after, seed)
    return {**metrics.summary(after), **{key: value for key, value in changes.items() if "change" in key}}


def _drawable(drafts: Sequence[Draft]) -> Bools:
    return np.array([bool(draft.cuts) for draft in drafts])


def _features(drafts: Sequence[Draft]) -> list[npt.NDArray[np.float64]]:
    """[K, F] of each draft; a row of zeros for a blank one, which is never shown."""
    return [np.array(draft.features or [[0.0] * len(verdict.FEATURES)]) for draft in drafts]


def _likely(draft: Draft, limit: float) -> int:
    """The last cut before any token with a log-prob below `limit`, of those that leave something standing; else the first that does."""
    enough = [at for at, row in enumerate(draft.features) if np.expm1(row[verdict.SIZE]) >= _FEWEST] or [len(draft.cuts) - 1]
    likely = [at for at in enough if draft.features and draft.features[at][verdict.FEATURES.index("min_logp")] >= limit]
    return draft.cuts[(likely or enough)[-1 if likely else 0]] if draft.cuts else 0


def _top(score: Sequence[float], allowed: Bools, count: int) -> Bools:
    """The `count` best-scored of the allowed ones."""
    order = np.argsort(-np.where(allowed, np.asarray(score), -np.inf), kind="stable")
    chosen = np.zeros(len(score), dtype=bool)
    chosen[order[:count]] = True
    return chosen & allowed
