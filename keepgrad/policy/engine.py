"""The embedded engine: continuous batching of Tab drafts with transformers, exact behaviour log-probs, versions side by side as adapters.

One thread owns the model. Between two decoding steps it admits waiting requests, loads and unloads versions, and drops finished rows, so
a swap never refuses a request. A version adapted `from last` computes its prompt up to the last token with the base's weights: that KV is
the base's, shared by all versions asked in one request; adapters act from the last prompt token on.

Shapes: R rows (one per request and version), T positions, V vocabulary.
"""

import asyncio
import dataclasses
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import peft
import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from keepgrad.config import Config
from keepgrad.errors import EngineError, KeepgradError, VersionError
from keepgrad.policy import model as models
from keepgrad.policy import verdict as verdicts
from keepgrad.policy.prompt import Prompter
from keepgrad.policy.versions import Store
from keepgrad.records import Draft, EngineRequest

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
WEIGHTS = "model.safetensors"
_PREFILL_ROWS = 16
_BASE = "__base__"


@dataclasses.dataclass
class _Row:
    """One draft under way."""

    request: EngineRequest
    version: str
    done: Callable[[Draft], None]
    uniforms: npt.NDArray[np.float64]
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    plain: list[float] = dataclasses.field(default_factory=list)
    first_max: float = 0.0
    first_entropy: float = 0.0


@dataclasses.dataclass
class _Batch:
    """Rows decoded together: left-padded KV, `mask` [R, T] of real positions, `last` [R] the token each row reads next."""

    rows: list[_Row]
    cache: DynamicCache
    mask: torch.Tensor
    last: torch.Tensor


@dataclasses.dataclass
class _Loaded:
    """A version in memory. `adapter` is None for the base and for versions of full weights, which bring a model of their own."""

    head: verdicts.Head
    adapter: str | None
    model: Any
    from_last: bool
    used: float = 0.0


class Engine:
    """Drafts for many callers at once; `generate` may be awaited from any event loop."""

    def __init__(self, config: Config, store: Store, on_broken: Callable[[], None] = lambda: None) -> None:
        """`on_broken` is called, from the engine's thread, should that thread come to an unforeseen end."""
        self._config, self._store, self._on_broken = config, store, on_broken
        folder = models.resolve(config.model.path)
        if config.engine.threads:
            torch.set_num_threads(config.engine.threads)
        self.prompter = Prompter(folder)
        self._base = models.load(folder, models.dtype(config.model.dtype))
        stops, _ = self.prompter.stops()
        self._stop = torch.zeros(self._base.config.vocab_size, dtype=torch.bool)
        self._stop[stops] = True
        self._peft: Any = None
        self._versions: dict[str, _Loaded] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: list[_Row] = []
        self._batches: dict[int, _Batch] = {}
        self._active: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._thread = threading.Thread(target=self._loop, name="keepgrad-engine", daemon=True)
        self._broken: str = ""
        self._asked: set[Future[Any]] = set()

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the rows under way."""
        self._work.put(None)
        self._thread.join()

    async def generate(self, request: EngineRequest) -> list[Draft]:
        """One draft per version of the request, in its order. Raises VersionError for a version that cannot be loaded."""
        drafts: list[Draft] = await self._ask(lambda future: self._admit(request, future))
        return drafts

    async def load(self, version: str) -> None:
        """Bring a version into memory; harmless if it is there."""
        await self._ask(lambda future: future.set_result(self._loaded(version) and None))

    async def unload(self, version: str) -> None:
        """Take a version out of memory once no row uses it."""
        while not await self._ask(lambda future: future.set_result(self._drop(version))):
            await asyncio.sleep(0.05)

    def status(self) -> dict[str, Any]:
        """Loaded versions, rows under way, counts and seconds since start."""
        return {
            "versions": list(self._versions),
            "active": {key: n for key, n in self._active.items() if n},
            "counts": dict(self._counts),
            "seconds": {key: round(value, 2) for key, value in self._seconds.items()},
            "broken": self._broken,
        }

    async def _ask(self, job: Callable[[Future[Any]], None]) -> Any:
        if self._broken:
            raise EngineError(f"the engine stopped ({self._broken}): restart `keepgrad engine` and try again")
        future: Future[Any] = Future()

        def run() -> None:
            try:
                job(future)
            except KeepgradError as error:
                future.set_exception(error)

        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        self._work.put(run)
        return await asyncio.wrap_future(future)

    # ---- the engine's thread

    def _loop(self) -> None:
        try:
            with torch.inference_mode():
                while True:
                    idle = not (self._waiting or self._batches)
                    if not self._drain(block=idle):
                        return
                    self._prefill()
                    for key in list(self._batches):
                        self._step(key)
        except Exception as error:  # the thread must not die silently: every later caller is told
            self._broken = f"{type(error).__name__}: {error}"
            for future in list(self._asked):
                if not future.done():
                    future.set_exception(EngineError(f"the engine stopped ({self._broken}): try again in a moment"))
            self._on_broken()
            raise

    def _drain(self, block: bool) -> bool:
        while True:
            try:
                job = self._work.get(block=block)
            except queue.Empty:
                return True
            if job is None:
                return False
            job()
            block = False

    def _admit(self, request: EngineRequest, future: Future[Any]) -> None:
        for version in request.versions:
            self._loaded(version)
        drafts: dict[int, Draft] = {}

        def finisher(index: int) -> Callable[[Draft], None]:
            def finish(draft: Draft) -> None:
                drafts[index] = draft
                if len(drafts) == len(request.versions) and not future.cancelled():
                    future.set_result([drafts[i] for i in range(len(drafts))])

            return finish

        # One stream of uniforms per seed: versions compared on the same seed meet the same luck (a monotone coupling of their draws).
        uniforms = np.random.Generator(np.random.Philox(key=request.seed & (2**64 - 1))).random(request.sampling.max_tokens + 2)
        self._counts["requests"] += 1
        for index, version in enumerate(request.versions):
            self._active[version] += 1
            self._waiting.append(_Row(request, version, finisher(index), uniforms))

    def _loaded(self, version: str) -> _Loaded:
        if version not in self._versions:
            began = time.monotonic()
            self._make_room()
            self._versions[version] = self._read(version)
            self._seconds["load"] += time.monotonic() - began
        found = self._versions[version]
        found.used = time.monotonic()
        return found

    def _read(self, version: str) -> _Loaded:
        manifest = self._store.read(version)
        self._store.verify(version)
        folder = self._store.path(version)
        head = verdicts.from_bytes((folder / verdicts.FILE).read_bytes())
        if WEIGHTS in manifest.files:
            own = models.load(models.resolve(self._config.model.path), models.dtype(self._config.model.dtype))
            from safetensors.torch import load_file

            own.load_state_dict(load_file(folder / WEIGHTS), strict=False)
            return _Loaded(head, None, own, from_last=False)
        if ADAPTER[1] not in manifest.files:
            return _Loaded(head, None, self._base, from_last=True)
        try:
            if self._peft is None:
                self._peft = peft.PeftModel.from_pretrained(self._base, str(folder), adapter_name=version, autocast_adapter_dtype=False)
            else:
                self._peft.load_adapter(str(folder), adapter_name=version, autocast_adapter_dtype=False)
        except (RuntimeError, ValueError, KeyError) as error:
            raise VersionError(f"version {version} does not fit the model ({str(error).splitlines()[0]}): roll back to another") from error
        self._peft.eval().to(self._base.dtype)
        return _Loaded(head, version, self._base, from_last=(folder / "from_last").exists())

    def _make_room(self) -> None:
        while len(self._versions) >= self._config.engine.loaded_versions:
            free = [(loaded.used, name) for name, loaded in self._versions.items() if not self._active[name]]
            if not free or not self._drop(min(free)[1]):
                return

    def _drop(self, version: str) -> bool:
        if self._active[version]:
            return False
        loaded = self._versions.pop(version, None)
        if loaded and loaded.adapter and self._peft is not None:
            if len(self._peft.peft_config) == 1:  # peft keeps at least one adapter: unwrap it altogether
                self._base = self._peft.unload()
                self._peft = None
            else:
                self._peft.delete_adapter(version)
        return True

    def _prefill(self) -> None:
        room = self._config.engine.max_batch - sum(len(batch.rows) for batch in self._batches.values())
        if room <= 0 or not self._waiting:
            return
        began = time.monotonic()
        chosen, self._waiting = self._waiting[:room], self._waiting[room:]
        groups: dict[tuple[int, str | None], list[_Row]] = {}
        for row in chosen:
            loaded = self._versions[row.version]
            under = None if loaded.from_last else loaded.adapter
            groups.setdefault((id(loaded.model), under), []).append(row)
        for (key, under), rows in groups.items():
            prompts: dict[int, list[_Row]] = {}
            for row in rows:
                prompts.setdefault(id(row.request), []).append(row)
            shared = list(prompts.values())
            for at in range(0, len(shared), _PREFILL_ROWS):
                self._join(key, self._prefill_chunk(shared[at : at + _PREFILL_ROWS], under))
        self._seconds["prefill"] += time.monotonic() - began

    def _prefill_chunk(self, shared: list[list[_Row]], under: str | None) -> _Batch:
        prompts = [rows[0].request.prompt_ids for rows in shared]
        longest = max(len(prompt) for prompt in prompts) - 1
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for index, prompt in enumerate(prompts):
            ids[index, longest - len(prompt) + 1 :] = torch.tensor(prompt[:-1])
            mask[index, longest - len(prompt) + 1 :] = 1
        model = self._versions[shared[0][0].version].model
        cache = DynamicCache()
        self._forward(model, [under] * len(prompts), ids, mask, cache)
        self._counts["prompt_tokens"] += int(mask.sum())
        spread = torch.tensor([index for index, rows in enumerate(shared) for _ in rows])
        last = torch.tensor([prompt[-1] for prompt in prompts])[spread]
        batch = _Batch([row for rows in shared for row in rows], cache, mask, last)
        if len(spread) > len(shared):
            cache.batch_select_indices(spread)
            batch.mask = mask[spread]
        return batch

    def _join(self, key: int, new: _Batch) -> None:
        old = self._batches.get(key)
        if old is None:
            self._batches[key] = new
            return
        width = max(old.mask.shape[1], new.mask.shape[1])
        caches = [(batch.cache, width - batch.mask.shape[1]) for batch in (old, new)]
        for index, layer in enumerate(old.cache.layers):
            for name in ("keys", "values"):
                parts = [pad(getattr(cache.layers[index], name), (0, 0, short, 0)) for cache, short in caches]
                setattr(layer, name, torch.cat(parts))
        old.mask = torch.cat([pad(batch.mask, (width - batch.mask.shape[1], 0)) for batch in (old, new)])
        old.last = torch.cat([old.last, new.last])
        old.rows += new.rows

    def _forward(self, model: Any, adapters: list[str | None], ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Logits [R, V] after the last position; `ids` [R, t] are the new tokens, `mask` [R, T] covers cache and new tokens."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        named = {}
        if self._peft is not None and model is self._base:
            named = {"adapter_names": [name or _BASE for name in adapters]}
            model = self._peft
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        # An index tensor, not 1: the slice that 1 makes is not contiguous, and lm_head then takes a path ten times slower in bfloat16.
        out = model(**inputs, logits_to_keep=torch.tensor([ids.shape[1] - 1]), **named)
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits

    def _step(self, key: int) -> None:
        batch = self._batches[key]
        began = time.monotonic()
        batch.mask = torch.cat([batch.mask, torch.ones(len(batch.rows), 1, dtype=torch.long)], 1)
        loaded = [self._versions[row.version] for row in batch.rows]
        logits = self._forward(loaded[0].model, [one.adapter for one in loaded], batch.last[:, None], batch.mask, batch.cache)
        ended = self._sample(batch, logits)
        self._counts["tokens"] += len(batch.rows)
        self._seconds["decode"] += time.monotonic() - began
        keep = [index for index, row in enumerate(batch.rows) if index not in ended]
        if not keep:
            del self._batches[key]
        elif ended:
            chosen = torch.tensor(keep)
            batch.cache.batch_select_indices(chosen)
            batch.mask, batch.last = batch.mask[chosen], batch.last[chosen]
            batch.rows = [batch.rows[index] for index in keep]
            spare = int((batch.mask.cumsum(1) == 0).all(0).sum())
            if spare > 32:  # positions that are padding in every row that is left
                layer: Any
                for layer in batch.cache.layers:
                    layer.keys, layer.values = layer.keys[:, :, spare:], layer.values[:, :, spare:]
                batch.mask = batch.mask[:, spare:]

    def _sample(self, batch: _Batch, logits: torch.Tensor) -> set[int]:
        temperatures = torch.tensor([row.request.sampling.temperature for row in batch.rows])
        plain = torch.log_softmax(logits, -1)
        warm = torch.log_softmax(logits / temperatures[:, None], -1)
        uniform = torch.tensor([row.uniforms[len(row.ids)] for row in batch.rows], dtype=torch.float32)
        summed = warm.exp().cumsum(-1)
        ids = torch.searchsorted(summed, (uniform * summed[:, -1])[:, None]).clamp(max=logits.shape[1] - 1)
        logp, at_one = warm.gather(1, ids)[:, 0].tolist(), plain.gather(1, ids)[:, 0].tolist()
        batch.last = ids[:, 0]
        fresh = [index for index, row in enumerate(batch.rows) if not row.ids]
        if fresh:
            first = plain[fresh]
            top, entropy = first.max(-1).values.tolist(), -(first.exp() * first).nan_to_num().sum(-1)
            for index, value, spread in zip(fresh, top, entropy.tolist(), strict=True):
                batch.rows[index].first_max, batch.rows[index].first_entropy = value, spread
        stops = self._stop[ids[:, 0]].tolist()
        ended = set()
        for index, row in enumerate(batch.rows):
            row.ids.append(int(ids[index, 0]))
            row.logprobs.append(logp[index])
            row.plain.append(at_one[index])
            if stops[index] or len(row.ids) >= row.request.sampling.max_tokens:
                self._finish(row, stops[index])
                ended.add(index)
        return ended

    def _finish(self, row: _Row, stopped: bool) -> None:
        texts = [self.prompter.clean(row.ids[:tokens], row.request.healed) for tokens in range(1, len(row.ids) + 1)]
        tail = self.prompter.decode(row.request.prompt_ids)
        cuts = verdicts.cuts(texts)
        inputs = [
            verdicts.features(tail, texts[cut - 1], row.plain[:cut], row.first_max, row.first_entropy, stopped and cut == len(row.ids))
            for cut in cuts
        ]
        explore = self._config.train.explore if row.request.sampling.explore else 0.0
        verdict = verdicts.NOTHING
        if cuts:
            verdict = self._versions[row.version].head.verdict(inputs, explore, *row.uniforms[-2:].tolist())
        cut = cuts[verdict.which] if cuts else 0
        self._active[row.version] -= 1
        row.done(
            Draft(
                version=row.version,
                completion_ids=row.ids,
                logprobs=row.logprobs,
                cuts=cuts,
                features=inputs,
                verdict="show" if verdict.shown else "silent",
                verdict_logprob=verdict.logprob,
                show_probability=verdict.show_probability,
                cut=cut,
                text=texts[cut - 1] if cut else "",
                finish="stop" if stopped else "length",
            )
        )


def base_files() -> dict[str, bytes]:
    """The files of a base version: no adapter, a head that always shows the whole draft."""
    return {verdicts.FILE: verdicts.always().to_bytes()}
