"""The training step, read top to bottom: parent weights, minibatches, loss, optimizer, verdict head, new version.

First the drafts (policy gradient), while the policy is still the one that wrote them; then the settled lines (distillation), which are
nobody's samples and need no ratio. Together in one minibatch, the second would take the policy away from under the first.

The state is written after every minibatch, so a killed step resumes where it was and ends in the same version.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import peft
import torch
from safetensors.torch import load_file, save, save_file
from transformers import DynamicCache

from keepgrad.config import Config
from keepgrad.errors import TrainError
from keepgrad.policy import model as models
from keepgrad.policy import verdict as verdicts
from keepgrad.policy.engine import WEIGHTS
from keepgrad.policy.versions import Store
from keepgrad.records import Draft, Sample, Version
from keepgrad.reward.spec import Spec
from keepgrad.train import batch as batching
from keepgrad.train import health as healths
from keepgrad.train import loss as losses
from keepgrad.train.head import calibrated, fit_head

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FROM_LAST = "from_last"
OPTIMIZER = "optimizer.safetensors"
_MICRO = 12

Progress = Callable[[int, int], None]
Redraft = Callable[[str], Mapping[str, Draft]]


class Worker:
    """Takes one step at a time; the base model stays loaded between steps."""

    def __init__(self, config: Config, store: Store) -> None:
        self._config, self._store = config, store
        self._folder = models.resolve(config.model.path)
        self._fingerprint = models.fingerprint(self._folder)
        self._kind = models.dtype(config.model.dtype)
        self._base: Any = None
        if config.train.mode not in ("lora", "full"):
            raise TrainError(f"[train] mode {config.train.mode!r} is not known: use lora or full")
        if config.train.mode == "full" and config.train.adapt_from == "last":
            raise TrainError("[train] mode full changes the context's KV too: set adapt_from to all")

    def run(
        self,
        parent: str,
        samples: Sequence[Sample],
        window: str,
        spec: Spec,
        seed: int,
        scratch: Path,
        progress: Progress = lambda done, total: None,
        redraft: Redraft | None = None,
    ) -> tuple[Version, dict[str, Any]]:
        """One pass over `samples` from version `parent`; returns the stored candidate and its health (see train/health.py).

        `redraft` drafts anew for some of the samples under a version, by generation; without it coverage holds on the parent's drafts only.
        Raises TrainError on empty or damaged samples and on a loss that is not finite; the parent is never touched.
        """
        train, began = self._config.train, time.monotonic()
        batching.check(samples)
        torch.manual_seed(seed)
        model = self._trainable(parent, seed)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=train.lr, weight_decay=0.0)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        parts = self._parts(samples, seed)
        meter = healths.Meter()
        done = self._restore(scratch, parent, model, optimizer, names, meter)
        for step in range(done, len(parts)):
            optimizer.zero_grad(set_to_none=True)
            loss = self._accumulate(model, samples, *parts[step], meter)
            if not torch.isfinite(torch.tensor(loss)):
                raise TrainError(
                    f"the loss of minibatch {step + 1} of {len(parts)} in {window} is {loss}: lower [train] lr; {parent} still serves"
                )
            torch.nn.utils.clip_grad_norm_(parameters, train.clip)
            optimizer.step()
            self._checkpoint(scratch, step + 1, model, optimizer, names, meter)
            progress(step + 1, len(parts))
        head = fit_head(self._head(parent), samples, spec, train.coverage, train.cuts)
        files = self._files(model, optimizer, names, head)

        def store() -> Version:
            return self._store.write(files, parent=parent, model=self._fingerprint, window=window, spec=spec.hash, seed=seed)

        version = store()
        if redraft:
            trial = version
            try:
                files[verdicts.FILE] = calibrated(head, samples, redraft(trial.id), train.coverage).to_bytes()
            except BaseException:
                self._store.discard(trial.id)
                raise
            version = store()
            if version.id != trial.id:
                self._store.discard(trial.id)
        health = meter.summary(samples, ratio_cap=train.ratio_cap) | {"steps": len(parts), "seconds": round(time.monotonic() - began, 2)}
        self._base = model.unload() if train.mode == "lora" else None
        return version, health

    # ---- one minibatch

    def _parts(self, samples: Sequence[Sample], seed: int) -> list[tuple[list[int], bool]]:
        """Minibatches in order, each with whether it is of settled lines: all drafts first."""
        train = self._config.train
        drafted = [at for at, sample in enumerate(samples) if train.policy_weight and batching.drafted(sample)]
        settled = [at for at, sample in enumerate(samples) if train.settled_weight and sample.settled_ids]
        drafts, lines = batching.minibatches(drafted, train.minibatch, seed), batching.minibatches(settled, train.settled_minibatch, seed)
        return [(chosen, False) for chosen in drafts] + [(chosen, True) for chosen in lines]

    def _accumulate(self, model: Any, samples: Sequence[Sample], chosen: Sequence[int], settled: bool, meter: healths.Meter) -> float:
        """Gradients of one minibatch, added up over micro-batches; returns the loss."""
        train, total = self._config.train, 0.0
        tokens = float(sum(len(batching.continuation(samples[i], settled)) for i in chosen))
        for rows in batching.rows(samples, chosen, settled, _MICRO):
            logp, entropy = self._logps(model, rows)
            if settled:
                loss = train.settled_weight * losses.distillation(logp, rows.learned, rows.weight, tokens)
                meter.settled(logp.detach()[rows.learned])
            else:
                policy = losses.policy_gradient(logp, rows.behaviour, rows.advantage, rows.learned, rows.weight, train.ratio_cap, tokens)
                loss = train.policy_weight * policy.loss
                if train.kl_weight:
                    with torch.no_grad(), model.disable_adapter():
                        base, _ = self._logps(model, rows)
                    loss = loss + train.kl_weight * losses.kl_to_base(logp, base, rows.learned, tokens)
                meter.sampled(policy, entropy[rows.learned])
            loss.backward()
            total += float(loss.detach())
        return total

    def _logps(self, model: Any, rows: batching.Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob of each target [R, T] and entropy [R, T]: drafts at the temperature they were sampled with, settled lines at 1."""
        logits = self._from_last(model, rows) if self._config.train.adapt_from == "last" else self._packed(model, rows)
        warm = torch.log_softmax(logits.float() / (1.0 if rows.settled else self._config.model.temperature), -1)
        found = torch.zeros(rows.learned.shape)
        entropy = torch.zeros(rows.learned.shape)
        found[rows.learned] = warm.gather(1, rows.targets[rows.learned][:, None])[:, 0]
        with torch.no_grad():
            entropy[rows.learned] = -(warm.exp() * warm).sum(-1)
        return found, entropy

    def _from_last(self, model: Any, rows: batching.Rows) -> torch.Tensor:
        """Logits [N, V] where the context's KV is the base's: computed without gradient."""
        cache, mask = DynamicCache(), rows.context_mask
        with torch.no_grad(), model.disable_adapter(), self._autocast():
            positions, last = (mask.cumsum(1) - 1).clamp(min=0), torch.tensor([mask.shape[1] - 1])
            model(input_ids=rows.context, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=last)
        full = torch.cat([rows.context_mask, rows.learned.long()], 1)
        positions = (full.cumsum(1) - 1).clamp(min=0)[:, -rows.inputs.shape[1] :]
        with self._autocast():
            inner = model.get_base_model()
            hidden = inner.model(
                input_ids=rows.inputs, attention_mask=full, position_ids=positions, past_key_values=cache, use_cache=True
            ).last_hidden_state
            logits: torch.Tensor = inner.lm_head(hidden[rows.learned])
        return logits

    def _packed(self, model: Any, rows: batching.Rows) -> torch.Tensor:
        """Logits [N, V] of whole sequences, packed without padding into one row."""
        packed = batching.pack(rows)
        inner = model.get_base_model() if self._config.train.mode == "lora" else model
        blocked = torch.zeros(packed.mask.shape, dtype=self._kind).masked_fill(~packed.mask, torch.finfo(self._kind).min)
        with self._autocast():
            hidden = inner.model(input_ids=packed.ids, attention_mask=blocked, position_ids=packed.positions, use_cache=False)
            logits: torch.Tensor = inner.lm_head(hidden.last_hidden_state[0, packed.where])
        return logits

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._kind == torch.bfloat16)

    # ---- weights in and out

    def _trainable(self, parent: str, seed: int) -> Any:
        """The parent's weights with gradients where the configuration trains."""
        train, folder = self._config.train, self._store.path(parent)
        self._store.verify(parent)
        if train.mode == "full":
            model = models.load(self._folder, torch.float32)
            if (folder / WEIGHTS).exists():
                model.load_state_dict(load_file(folder / WEIGHTS), strict=False)
            first = model.config.num_hidden_layers - train.layers if train.layers else 0
            for name, parameter in model.named_parameters():
                layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else -1
                parameter.requires_grad_(not train.layers or layer >= first)
            return model
        self._base = self._base or models.load(self._folder, self._kind)
        if (folder / "adapter_model.safetensors").exists():
            model = peft.PeftModel.from_pretrained(self._base, str(folder), is_trainable=True)
        else:
            layers = self._base.config.num_hidden_layers
            chosen = list(range(layers - train.layers, layers)) if 0 < train.layers < layers else None
            torch.manual_seed(seed)
            model = peft.get_peft_model(
                self._base,
                peft.LoraConfig(r=train.rank, lora_alpha=train.alpha, target_modules=TARGETS, layers_to_transform=chosen, lora_dropout=0.0),
            )
        return model.eval()

    def _head(self, parent: str) -> verdicts.Head:
        return verdicts.from_bytes((self._store.path(parent) / verdicts.FILE).read_bytes())

    def _files(self, model: Any, optimizer: Any, names: list[str], head: verdicts.Head) -> dict[str, bytes]:
        """What the candidate consists of: weights, verdict head, and the optimizer's state for whoever trains on from it."""
        files = {verdicts.FILE: head.to_bytes(), OPTIMIZER: save(_moments(optimizer, names))}
        if self._config.train.mode == "full":
            files[WEIGHTS] = save({n: p.detach().to(self._kind).contiguous() for n, p in model.named_parameters() if p.requires_grad})
            return files
        state = {key: value.contiguous() for key, value in peft.get_peft_model_state_dict(model).items()}
        settings = model.peft_config["default"].to_dict()
        settings["base_model_name_or_path"] = ""  # a version may not name a path of this machine
        settings["inference_mode"] = True
        files["adapter_model.safetensors"] = save(state)
        files["adapter_config.json"] = msgspec.json.format(msgspec.json.encode(settings, enc_hook=_plain, order="sorted"))
        if self._config.train.adapt_from == "last":
            files[FROM_LAST] = b"adapters act from the last prompt token on\n"
        return files

    # ---- resuming

    def _checkpoint(self, scratch: Path, step: int, model: Any, optimizer: Any, names: list[str], meter: healths.Meter) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        tensors = {f"p.{n}": p.detach().contiguous() for n, p in model.named_parameters() if p.requires_grad}
        tensors |= {f"o.{name}": value for name, value in _moments(optimizer, names).items()}
        part = scratch / "checkpoint.part"
        save_file(tensors, part, metadata={"step": str(step), "meter": meter.dump()})
        part.replace(scratch / "checkpoint.safetensors")

    def _restore(self, scratch: Path, parent: str, model: Any, optimizer: Any, names: list[str], meter: healths.Meter) -> int:
        """Load the checkpoint if there is one, else the parent's optimizer state; returns the minibatches already done."""
        file = scratch / "checkpoint.safetensors"
        if not file.exists():
            before = self._store.path(parent) / OPTIMIZER
            if before.exists():
                _set_moments(optimizer, names, load_file(before))
            return 0
        from safetensors import safe_open

        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(file)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(tensors[f"p.{name}"])
        _set_moments(optimizer, names, {key[2:]: value for key, value in tensors.items() if key.startswith("o.")})
        meter.restore(metadata["meter"])
        return int(metadata["step"])


def _moments(optimizer: Any, names: list[str]) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"{names[index]}.{key}": value.contiguous() for index, entry in state.items() for key, value in entry.items()}


def _set_moments(optimizer: Any, names: list[str], tensors: dict[str, torch.Tensor]) -> None:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for index, name in enumerate(names):
        entry = {key: tensors[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{key}" in tensors}
        if len(entry) == 3:
            state[index] = entry
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _plain(value: object) -> object:
    if isinstance(value, set):
        return sorted(value)
    return str(value)
