"""The whole configuration: one tree, read once from keepgrad.toml. Unknown keys fail; each field's line says what it is."""

import tomllib
from pathlib import Path

import msgspec

from keepgrad.errors import ConfigError


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which model is served and trained, and how it is prompted."""

    path: str = "smollm2-135m"
    """`smollm2-135m` (fetched once), a local folder, or a hub name."""
    dtype: str = "auto"
    """`auto`: bfloat16 where the CPU computes in it, else float32; or name one."""
    context_tokens: int = 128
    """Most tokens of code before the cursor that the model sees."""
    max_tokens: int = 24
    """Most tokens of one suggestion."""
    temperature: float = 0.4
    """Sampling temperature; behaviour log-probs are of the distribution after it."""


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where things listen and lie."""

    data: str = ".keepgrad"
    """Folder of the ledger, segments and versions."""
    host: str = "127.0.0.1"
    """Address the gateway listens on; anything but loopback needs keys."""
    port: int = 8711
    """Port of the gateway."""
    engine_port: int = 8712
    """Port of the engine; it listens on loopback only."""
    max_body_bytes: int = 1_000_000
    """Largest request body the gateway takes."""


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The embedded engine."""

    max_batch: int = 64
    """Most sequences decoded together."""
    threads: int = 0
    """Torch threads; 0: all cores."""
    loaded_versions: int = 4
    """Adapters kept loaded; the oldest without leases goes first."""


class Train(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One on-policy step per cycle (design section 7)."""

    mode: str = "lora"
    """`lora` or `full`."""
    rank: int = 16
    """Rank of the LoRA matrices."""
    alpha: int = 32
    """LoRA scale: updates count alpha / rank times."""
    layers: int = 14
    """Adapt only the last k layers; 0: all."""
    adapt_from: str = "last"
    """`last`: only from the last context token on, so the context's KV is the base's and shared by all versions; `all`: everywhere."""
    lr: float = 5e-4
    """AdamW's learning rate."""
    clip: float = 1.0
    """Largest norm of the gradient; longer ones are scaled down to it."""
    minibatch: int = 64
    """Drafts per optimizer step."""
    settled_minibatch: int = 16
    """Settled lines per optimizer step: smaller, since they carry less noise than rewards do."""
    ratio_cap: float = 2.0
    """Importance ratios against the recorded log-probs are truncated here."""
    baseline: str = "bucket"
    """`bucket` (leave-one-out in context buckets), `mean`, or `value` (fitted on context features)."""
    settled_weight: float = 1.0
    """Weight of the distillation term on the developer's own settled text; 0: none."""
    policy_weight: float = 1.0
    """Weight of the policy-gradient term."""
    kl_weight: float = 0.0
    """Weight of k2 to the base, as a loss."""
    coverage: float = 0.70
    """The verdict head may not be silent at more than 1 minus this share of opportunities."""
    cuts: bool = True
    """Whether drafts may be cut where they stop being likely to be taken; false: whole or not at all."""
    redrafts: int = 192
    """Prompts of the window that a candidate drafts for anew, so that its coverage is that of its own drafts; 0: none."""
    explore: float = 0.1
    """On exploring traffic, the least probability with which a draft is shown, and the share of drafts that are cut anywhere."""
    user_cap: float = 0.1
    """Largest share of a batch's weight that one user may have (P8)."""


class Reward(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which reward spec is in force."""

    spec: str = "tab"
    """Name of a shipped spec, or the path of a TOML file."""


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Gate and canary (design section 8)."""

    gate_contexts: int = 160
    """Contexts one offline gate asks, taken in turn from the suite."""
    gate_min_contexts: int = 64
    """With fewer contexts than this the gate does not decide."""
    margin: float = 0.10
    """Largest relative loss on a metric that still counts as non-inferior."""
    alpha: float = 0.05
    """Error rate of gate and canary, over all their metrics and looks."""
    canary_share: float = 0.3
    """Share of users who get the candidate in the canary."""
    canary_min: int = 60
    """Opportunities in the canary arm before it may be promoted."""
    canary_max: int = 200
    """Opportunities in the canary arm at which it must decide."""
    holdback_share: float = 0.1
    """Share of users who never get a new version."""


class Cycle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One turn of the loop: sizes and budgets in seconds."""

    window: int = 512
    """Generations per training window."""
    mature_s: float = 60.0
    """Longest real time to wait for a window's outcomes after it is full."""
    collect_s: float = 3600.0
    """Budget of collect, in seconds; the same for each stage below."""
    score_s: float = 120.0
    """Budget of score."""
    audit_s: float = 120.0
    """Budget of audit."""
    train_s: float = 3600.0
    """Budget of train."""
    gate_s: float = 1800.0
    """Budget of gate."""
    canary_s: float = 3600.0
    """Budget of canary."""
    settle_s: float = 120.0
    """Budget of settle."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The root: one table per part."""

    model: Model = Model()
    server: Server = Server()
    engine: Engine = Engine()
    train: Train = Train()
    reward: Reward = Reward()
    release: Release = Release()
    cycle: Cycle = Cycle()
    seed: int = 0
    """Seed of everything that is drawn by keepgrad itself."""

    @property
    def root(self) -> Path:
        """The data folder as a path."""
        return Path(self.server.data).expanduser()


def load(path: str | Path | None = None) -> Config:
    """Read `path`, or ./keepgrad.toml if there, or the defaults. Raises ConfigError on anything it does not know."""
    file = Path(path) if path else Path("keepgrad.toml")
    if not file.exists():
        if path:
            raise ConfigError(f"no configuration file at {file}: give an existing file with --config, or leave it out for the defaults")
        return Config()
    try:
        tree = tomllib.loads(file.read_text())
        return msgspec.convert(tree, Config)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}; see `keepgrad config` for every key and its default") from None


def dump(config: Config) -> str:
    """The configuration as TOML text, every key written out."""
    lines = []
    for name, value in msgspec.to_builtins(config).items():
        if isinstance(value, dict):
            lines.append(f"\n[{name}]")
            lines += [f"{key} = {_toml(item)}" for key, item in value.items()]
        else:
            lines.insert(0, f"{name} = {_toml(value)}")
    return "\n".join(lines).strip() + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
