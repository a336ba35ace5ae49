"""Before and after on code nobody trained on: base, best confidence filter and learned policy, on the same contexts, seeds and developers.

Four questions, each a paired change with a 95 % interval by file:
  change        base that always shows  ->  the learned policy as served (at its cut)
  over_filter   best filter without any learning, at the learner's number shown  ->  the learned policy
  text_gain     base text  ->  learned text, both shown always: what the adapter does
  silence_gain  base text always shown  ->  base text under the learned silence head, at the same number shown: what the head does
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
from keepgrad.policy import silence
from keepgrad.policy.client import EngineClient
from keepgrad.policy.prompt import Prompter
from keepgrad.policy.versions import Store
from keepgrad.records import Draft, Sampling
from keepgrad.release import suite
from keepgrad.release.suite import Context
from keepgrad.simulate import corpus, developer

FILTERS = ("first_max_logp", "mean_logp", "sum_logp", "min_logp")
"""The confidences a filter without learning may cut on; the best of them by accept rate on these very contexts is the one compared with."""
_DEVELOPERS = 24


def judge(contexts: Sequence[Context], drafts: Sequence[Draft], shown: npt.NDArray[np.bool_], seed: int) -> list[Judged]:
    """What the simulated developers make of drafts of which those in `shown` are drawn; the same developer and luck per context always."""
    judged = []
    for context, draft, draw in zip(contexts, drafts, shown.tolist(), strict=True):
        taken, chars = False, 0
        if draw:
            name = f"judge-{int.from_bytes(hashlib.sha256(context.id.encode()).digest()[:4], 'big') % _DEVELOPERS}"
            draws = developer.Draws(seed, name, context.id)
            decision = developer.decide(draft.text, context.truth, developer.temperament(seed, name), draws)
            taken, chars = decision.taken, decision.chars if decision.taken else 0
        judged.append(Judged(context.id, context.file, bool(draw), taken, chars, len(draft.text) if draw else 0))
    return judged


def compare(contexts: Sequence[Context], base: Sequence[Draft], final: Sequence[Draft], head: silence.Head, seed: int) -> dict[str, Any]:
    """The four comparisons for drafts of the base and the final version on the same contexts; keys as the report names them."""
    always, served = _drawable(base), np.array([draft.verdict == "show" for draft in final])
    before, after = judge(contexts, base, always, seed), judge(contexts, final, served, seed)
    count = int(served.sum())
    filters = {name: judge(contexts, base, _top(_features(base)[:, silence.FEATURES.index(name)], always, count), seed) for name in FILTERS}
    best = max(filters, key=lambda name: metrics.summary(filters[name])["accept_rate"] or 0.0)
    text = judge(contexts, final, _drawable(final), seed)
    quiet = judge(contexts, base, _top(head.logit(_features(base)), always, count), seed)
    return {
        **metrics.change(before, after, seed),
        "before": metrics.summary(before),
        "after": metrics.summary(after),
        "filter": {
            "on": best,
            **metrics.summary(filters[best]),
            **{f"{key}": value for key, value in metrics.change(before, filters[best], seed).items() if "change" in key},
            "accept_rate_by_filter": {name: metrics.summary(judged)["accept_rate"] for name, judged in filters.items()},
        },
        "over_filter": metrics.change(filters[best], after, seed),
        "text_gain": metrics.change(before, text, seed),
        "silence_gain": metrics.change(before, quiet, seed),
    }


async def evaluate(config: Config, engine: EngineClient, base: str, final: str, heldout: int, projects: int, seed: int) -> dict[str, Any]:
    """{"heldout": ..., "projects": ...}: `compare` on held-out files of known projects and on projects never trained on.

    `heldout` and `projects` are numbers of contexts. Raises EngineError if the engine stays away.
    """
    store, prompter = Store(config.root), Prompter(Path((await engine.status())["folder"]))
    head = silence.from_bytes((store.path(final) / "silence.json").read_bytes())
    sampling = Sampling(temperature=config.model.temperature, max_tokens=config.model.max_tokens, explore=False)
    result: dict[str, Any] = {}
    sizes: tuple[tuple[corpus.Split, int], ...] = (("heldout", heldout), ("projects", projects))
    for split, count in sizes:
        contexts = suite.cut(corpus.files(split), count, seed)
        drafts = await suite.draft(engine, prompter, contexts, [base, final], sampling, seed, context_tokens=config.model.context_tokens)
        result[split] = compare(contexts, drafts[base], drafts[final], head, seed)
    return result


def _drawable(drafts: Sequence[Draft]) -> npt.NDArray[np.bool_]:
    return np.array([bool(draft.text.strip()) for draft in drafts])


def _features(drafts: Sequence[Draft]) -> npt.NDArray[np.float64]:
    return np.array([draft.features for draft in drafts])


def _top(score: npt.NDArray[np.float64], allowed: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.bool_]:
    """The `count` best-scored of the allowed ones."""
    order = np.argsort(-np.where(allowed, score, -np.inf), kind="stable")
    chosen = np.zeros(len(score), dtype=bool)
    chosen[order[:count]] = True
    return chosen & allowed
