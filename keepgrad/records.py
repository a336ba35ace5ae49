"""Every record that crosses a file, a process or the wire: frozen msgspec structs, who makes them, who eats them, one worked example each.

Fields are only ever added. Times are integer milliseconds since the epoch: `*_ms` of the clock that the field's line names.
"""

import os
import threading
import time
from typing import Any, Literal

import msgspec

Verdict = Literal["show", "silent"]
Arm = Literal["incumbent", "canary", "holdback"]
Place = Literal["rewarded", "pending", "censored", "excluded"]
EventKind = Literal["shown", "accepted", "partial", "typed_through", "rejected", "ignored", "not_drawn", "settled", "survival", "closed"]

_uuid_lock = threading.Lock()
_uuid_last = [0, 0]


def uuid7(now_ms: int | None = None) -> str:
    """A UUIDv7 (RFC 9562): 48 bits of Unix milliseconds, then a per-process counter and randomness, so ids sort by time."""
    with _uuid_lock:
        ms = int(time.time() * 1000) if now_ms is None else now_ms
        if ms <= _uuid_last[0] and now_ms is None:
            ms = _uuid_last[0]
            _uuid_last[1] += 1
        else:
            _uuid_last[:] = [ms, 0]
        sequence = _uuid_last[1]
        if sequence > 0xFFF:
            ms, sequence = ms + 1, 0
            _uuid_last[:] = [ms, 0]
    tail = int.from_bytes(os.urandom(8), "big") & ((1 << 62) - 1)
    value = (ms & ((1 << 48) - 1)) << 80 | 0x7 << 76 | sequence << 64 | 0b10 << 62 | tail
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class Sampling(msgspec.Struct, frozen=True):
    """How tokens were drawn. Made by the gateway from the configuration, eaten by the engine, kept with each generation.

    >>> Sampling(temperature=0.4, max_tokens=24, explore=True)
    """

    temperature: float = 0.4
    max_tokens: int = 24
    explore: bool = True
    """True: the verdict is sampled (training traffic). False: it is served at the cut, i.e. show iff p(show) >= 0.5."""


class TabRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/keepgrad/tab`: one Tab opportunity. Made by an editor, eaten by the gateway.

    >>> TabRequest(prefix="def add(a, b):\\n    return ", conversation="0190...", at_ms=1764400000000)
    """

    prefix: str
    conversation: str
    at_ms: int
    """The client's clock."""
    suffix: str = ""
    path: str = ""
    id: str = ""
    """UUIDv7 of the generation if the client wants to choose it (retries are then harmless); empty: the gateway makes one."""
    seed: int | None = None


class TabResponse(msgspec.Struct, frozen=True):
    """Answer to `TabRequest`. `text` is empty when the policy is silent; `show_probability` says how sure it was.

    >>> TabResponse(id="0190...", text="a + b", verdict="show", version="v-3f2a...", show_probability=0.83)
    """

    id: str
    text: str
    verdict: Verdict
    version: str
    show_probability: float


class EngineRequest(msgspec.Struct, frozen=True):
    """`POST /generate` of the engine: one prompt under one or more versions, which share its prefill. Made by the gateway and the gate.

    >>> EngineRequest(prompt_ids=[1, 504, 260], versions=["v-base"], seed=7)
    """

    prompt_ids: list[int]
    versions: list[str]
    seed: int
    sampling: Sampling = Sampling()
    healed: bool = False
    """True: the prompt ends one space before the cursor (see policy/prompt.py)."""


class Draft(msgspec.Struct, frozen=True):
    """What the engine sampled under one version. Made by the engine, eaten by the gateway (as Generation + Tokens) and the gate.

    `completion_ids[t]` was drawn from the distribution that gave it `logprobs[t]` (temperature applied); the verdict, show or silent,
    was drawn after the draft with probability exp(verdict_logprob). `cuts` are the numbers of tokens up to which the draft could have been
    shown, `features` [len(cuts)][F] the inputs of the version's verdict head, one row for each. `text` is the draft up to `cut`, the one of
    them that was chosen (0 and empty if there is none).

    >>> Draft(version="v-base", completion_ids=[504, 198], logprobs=[-0.1, -0.4], cuts=[2], features=[[0.2]], verdict="show",
    ...       verdict_logprob=0.0, show_probability=1.0, cut=2, text="a + b", finish="stop")
    """

    version: str
    completion_ids: list[int]
    logprobs: list[float]
    cuts: list[int]
    features: list[list[float]]
    verdict: Verdict
    verdict_logprob: float
    show_probability: float
    cut: int
    text: str
    finish: Literal["stop", "length"]


class Generation(msgspec.Struct, frozen=True):
    """One model call as served. Made by the gateway before it answers; immutable. Its arrays are in `Tokens`.

    >>> Generation(id="0190...", kind="tab", org="acme", user="u-91ab", key="k-1", conversation="0190...", version="v-3f2a...",
    ...            arm="incumbent", consent="code", seed=7, sampling=Sampling(), prompt_tokens=96, completion_tokens=8,
    ...            verdict="show", verdict_logprob=-0.01, show_probability=0.99, finish="stop", text="a + b", path="src/a.py",
    ...            client_ms=1764400000000, created_ms=1764400000123, latency_ms=85.0)
    """

    id: str
    kind: Literal["tab", "agent"]
    org: str
    user: str
    """Hash of organisation and user name."""
    key: str
    conversation: str
    version: str
    arm: Arm
    consent: Literal["metadata", "code"]
    """At `metadata`, `text`, `path` and all arrays are empty. At `none` there is no record at all."""
    seed: int
    sampling: Sampling
    prompt_tokens: int
    completion_tokens: int
    verdict: Verdict
    verdict_logprob: float
    show_probability: float
    finish: Literal["stop", "length"]
    text: str
    path: str
    client_ms: int
    """Client's clock, as asked."""
    created_ms: int
    """Gateway's clock."""
    latency_ms: float
    healed: bool = False
    """True: the prompt ends one space before the cursor, so what continues it starts with that space (see policy/prompt.py)."""
    cut: int = 0
    """Completion tokens that `text` covers; behind them the draft went on unseen. 0 for a blank draft."""


class Tokens(msgspec.Struct, frozen=True):
    """The arrays of one generation, token-exact (P2). Made by the gateway, kept in Parquet segments, eaten by training.

    `cuts` and `features` are those of the `Draft`.

    >>> Tokens(generation="0190...", prompt_ids=[1, 504], completion_ids=[260, 198], logprobs=[-0.2, -0.1], cuts=[2], features=[[0.3, 0.1]])
    """

    generation: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    cuts: list[int]
    features: list[list[float]]


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing a client saw happen to a generation; idempotent by id. Made by whoever saw it, eaten by outcomes.

    `chars`: for `partial` the accepted characters; for `survival` the edit distance in per mille of the accepted text's length.
    `reason`: for `ignored` superseded | typing_disagreed | expired; for `settled` quiet | timeout; for `closed` closed.
    `text`: for `settled` what stands in the suggestion's region now (first line). `horizon_s`: for `survival`.

    >>> Event(id="0190...", generation="0190...", kind="accepted", at_ms=1764400001200)
    """

    id: str
    generation: str
    kind: EventKind
    at_ms: int
    chars: int = 0
    reason: str = ""
    text: str = ""
    horizon_s: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """What one generation amounts to at time t. Made by outcomes/episode.py, eaten by reward and metrics; never stored as truth.

    `end`: accepted | partial | typed_through | rejected | ignored | not_drawn | abstained | "" while unknown.
    `state`: observed | pending | censored; `reason` says why when not observed, or which `ignored`.

    >>> Outcome(generation="0190...", state="observed", end="accepted", reason="", accepted_chars=5, shown_chars=5, settled_text="a + b")
    """

    generation: str
    state: Literal["observed", "pending", "censored"]
    end: str
    reason: str
    accepted_chars: int
    shown_chars: int
    settled_text: str
    survival: dict[int, float] = {}
    """Horizon in seconds to relative edit distance (0 unchanged, 1 all changed)."""
    events: int = 0
    """How many events of the generation were known."""


class Score(msgspec.Struct, frozen=True):
    """Where a generation is in the books (P1) and its reward by term. Made by reward/score.py, eaten by training and the audit.

    >>> Score(generation="0190...", place="rewarded", reason="accepted", reward=0.75, terms={"accept": 0.75, "size": 0.0}, spec="9c1e...")
    """

    generation: str
    place: Place
    reason: str
    reward: float
    terms: dict[str, float]
    spec: str
    events: int = 0
    """How many events of the generation were known then; there can only be more later, so the audit sees when one is gone."""


class Sample(msgspec.Struct, frozen=True):
    """What the trainer eats: one generation with per-token advantages. Made by reward/score.py, eaten by train/.

    The action is the draft's tokens, then one verdict: `advantages` has len(completion_ids) + 1 entries, the last is the verdict's.
    `cuts`, `cut` and `features` are those of the draft, `taken` is the share of what was shown that was taken, and `right` says of each cut
    whether the settled line starts with the draft up to it (empty if that line is unknown).
    `settled_ids` is what the developer wrote instead or kept (empty if unknown): off-policy text for the distillation term, tokenised once.

    >>> Sample(generation="0190...", version="v-base", prompt_ids=[1, 504], completion_ids=[260, 198], logprobs=[-0.2, -0.1],
    ...        cuts=[2], features=[[0.3, 0.1]], cut=2, right=[True], shown=True, taken=1.0, verdict_logprob=-0.01, reward=0.75,
    ...        advantages=[0.5, 0.5, 0.75], settled_ids=[260, 198], weight=1.0, bucket=3)
    """

    generation: str
    version: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    cuts: list[int]
    features: list[list[float]]
    cut: int
    right: list[bool]
    shown: bool
    taken: float
    verdict_logprob: float
    reward: float
    advantages: list[float]
    settled_ids: list[int]
    weight: float
    bucket: int


class Version(msgspec.Struct, frozen=True):
    """Manifest of an immutable, content-addressed policy version. Made by policy/versions.py, read by all.

    >>> Version(id="v-3f2a...", parent="v-base...", model="sha256 of the base weights", window="w-000001", spec="9c1e...", code="0.1.0",
    ...         seed=0, files={"adapter_model.safetensors": "sha256"}, created_ms=1764400000000)
    """

    id: str
    parent: str
    model: str
    window: str
    spec: str
    code: str
    seed: int
    files: dict[str, str]
    created_ms: int


class Window(msgspec.Struct, frozen=True):
    """A closed range of generations, by ledger sequence number, that one cycle scores. Made by the cycle.

    >>> Window(id="w-000001", first_seq=1, last_seq=512, closed_ms=1764400000000)
    """

    id: str
    first_seq: int
    last_seq: int
    closed_ms: int


class Traffic(msgspec.Struct, frozen=True):
    """Which version answers whom from now on. Made by release/ and `keepgrad traffic`, read by the gateway at every request.

    Users whose hash (in [0, 1)) is below `holdback_share` get `holdback`; the next `canary_share` get `canary`; all others `incumbent`.
    `force`: open conversations move at once too (rollback), instead of keeping their version until they end.

    >>> Traffic(incumbent="v-a", previous="v-base", canary="v-b", canary_share=0.25, holdback="v-base", holdback_share=0.1, force=False,
    ...         reason="canary", at_ms=1764400000000)
    """

    incumbent: str
    previous: str
    canary: str
    canary_share: float
    holdback: str
    holdback_share: float
    force: bool
    reason: str
    at_ms: int


class GateVerdict(msgspec.Struct, frozen=True):
    """The numbers and decision of the offline gate or the online canary. Made by release/, eaten by the cycle and the report.

    `metrics`: name to {candidate, incumbent, difference, low, high, margin, passed, detectable}.

    >>> GateVerdict(id="0190...", stage="gate", candidate="v-b", incumbent="v-a", decision="pass", reason="all within margin",
    ...             metrics={}, contexts=192, at_ms=1764400000000)
    """

    id: str
    stage: Literal["gate", "canary"]
    candidate: str
    incumbent: str
    decision: Literal["pass", "fail", "extend"]
    reason: str
    metrics: dict[str, Any]
    contexts: int
    at_ms: int


class Key(msgspec.Struct, frozen=True):
    """An access key as stored: only the hash of its secret. Made by `keepgrad` at start, checked by the gateway.

    >>> Key(id="k-1", secret_hash="sha256...", org="acme", user="ann", consent="code", scopes=["serve", "events"], created_ms=1764400000000)
    """

    id: str
    secret_hash: str
    org: str
    user: str
    consent: Literal["none", "metadata", "code"]
    scopes: list[str]
    created_ms: int


class Revocation(msgspec.Struct, frozen=True):
    """The end of a key. Made by `keepgrad key revoke`, checked by the gateway at every request.

    >>> Revocation(id="k-1", reason="laptop lost", at_ms=1764400000000)
    """

    id: str
    reason: str
    at_ms: int
