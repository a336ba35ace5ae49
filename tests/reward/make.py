"""Generations, outcomes and scores for the reward's tests, built from real parts: events go through outcomes, outcomes through score."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from keepgrad.outcomes.episode import outcome
from keepgrad.policy.prompt import Prompter
from keepgrad.records import Event, Generation, Sampling, Tokens
from keepgrad.reward.score import Scored, score
from keepgrad.reward.spec import Spec

T0 = 1_764_400_000_000
LATER = T0 + 3_600_000


@cache
def prompter() -> Prompter:
    """A real tokenizer with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: at for at, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        return Prompter(Path(folder))


def generation(name: str, text: str = "return total", user: str = "u-1", shown: bool = True, **more: Any) -> Generation:
    """One served Tab suggestion; `shown` False: the policy was silent."""
    made = Generation(
        id=name, kind="tab", org="acme", user=user, key="k-1", conversation="c-1", version="v-1", arm="incumbent", consent="code", seed=7,
        sampling=Sampling(), prompt_tokens=3, completion_tokens=2, verdict="show" if shown else "silent", verdict_logprob=-0.1,
        show_probability=0.9, finish="stop", text=text, path="a.py", client_ms=T0, created_ms=T0, latency_ms=80.0,
        cut=2 if text.strip() else 0,
    )  # fmt: skip
    return msgspec.structs.replace(made, **more)


def events(name: str, end: str, chars: int = 0, settled: str = "") -> list[Event]:
    """Shown, its end, and the text it settled to."""
    return [
        Event(f"{name}-s", name, "shown", T0 + 300),
        msgspec.convert({"id": f"{name}-e", "generation": name, "kind": end, "at_ms": T0 + 1500, "chars": chars}, Event),
        Event(f"{name}-q", name, "settled", T0 + 12_000, reason="quiet", text=settled),
    ]


def scored(served: Generation, end: str, spec: Spec, chars: int = 0, settled: str = "", features: list[float] | None = None) -> Scored:
    """One row of what `samples` takes; `end` is "" where nothing was told."""
    found = outcome(served, events(served.id, end, chars, settled) if end else [], LATER)
    cuts = [2] if served.cut else []
    tokens = Tokens(served.id, [1, 2, 3], [4, 5], [-0.1, -0.2], cuts, [features or []] * len(cuts))
    return served, tokens, found, score(served, found, spec)


def reward(text: str, end: str, spec: Spec, chars: int = 0) -> float:
    """The reward of one suggestion that ended like this."""
    return scored(generation("g", text, shown=end != "abstained"), "" if end == "abstained" else end, spec, chars)[3].reward
