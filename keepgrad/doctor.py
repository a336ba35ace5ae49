"""What this machine has and lacks for keepgrad, and how to get what is missing. Reads and measures only; fetches and changes nothing."""

import importlib.metadata
import platform
import shutil
import socket
import sys
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from keepgrad.config import Config
from keepgrad.errors import ConfigError, ModelError

Level = Literal["ok", "warn", "fail"]

_MIN_PYTHON = (3, 11)
_MEMORY_GIB, _MEMORY_LEAST_GIB = 8.0, 5.0
_DISK_GIB, _DISK_LEAST_GIB = 3.0, 1.0
_GIB = 2**30
_EXTRAS = {
    "": ("httpx", "msgspec", "psutil", "rich"),
    "serve": ("litestar", "numpy", "prometheus-client", "pyarrow", "safetensors", "sqlalchemy", "tokenizers", "uvicorn"),
    "train": ("dbos", "gguf", "peft", "scipy", "torch", "transformers"),
    "report": ("matplotlib",),
}
_BF16_FLAGS = frozenset(["avx512_bf16", "amx_bf16", "bf16", "svebf16"])


class Check(msgspec.Struct, frozen=True):
    """One thing looked at. Made by `examine`, printed by `keepgrad doctor`. `fix` is empty when nothing is to be done.

    >>> Check(name="memory", level="ok", found="15.6 GiB", fix="")
    """

    name: str
    level: Level
    found: str
    fix: str = ""


def examine(config: Config) -> list[Check]:
    """Every check, in the order a newcomer would meet the trouble."""
    data = config.root
    checks = [_python(), *(_packages(extra, names) for extra, names in _EXTRAS.items()), _cores(), _memory(), _disk(data)]
    return [*checks, _bf16(), *_ports(config)]


def require_disk(folder: Path, least_gib: float = _DISK_LEAST_GIB) -> None:
    """Raise ConfigError if the disk that will hold `folder` has less than `least_gib` free."""
    free = shutil.disk_usage(_existing(folder)).free / _GIB
    if free < least_gib:
        raise ConfigError(f"the disk of {folder} has {free:.1f} GiB free and this needs {least_gib:.1f}: make room, or name another folder")


def require_port(host: str, port: int, key: str) -> None:
    """Raise ConfigError if something listens on the port already; `key` is the configuration key that names it."""
    if not port_free(host, port):
        raise ConfigError(f"port {port} on {host} is taken by another program: stop it, or set {key} to a free port in keepgrad.toml")


def port_free(host: str, port: int) -> bool:
    """Whether the port can be listened on now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port in TIME_WAIT after a restart counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _python() -> Check:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < _MIN_PYTHON:
        return Check("python", "fail", found, "install Python 3.11 or newer and make a new virtual environment with it")
    if sys.platform == "darwin" and platform.machine() == "x86_64":
        return Check("python", "warn", found, "torch has no builds for Macs with Intel processors: this machine can run a client only")
    return Check("python", "ok", found)


def _packages(extra: str, names: tuple[str, ...]) -> Check:
    missing, found = [], []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    title = f"packages to {extra}" if extra else "packages"
    if not missing:
        return Check(title, "ok", ", ".join(found))
    wanted = f"keepgrad[{extra}]" if extra else "keepgrad"
    return Check(
        title, "fail" if not extra else "warn", f"missing: {', '.join(missing)}", f"pip install '{wanted}', or make install in a clone"
    )


def _cores() -> Check:
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    if cores < 2:
        return Check("cores", "warn", str(cores), "the demo wants 2 cores for its 15 minutes: give it --minutes 30")
    return Check("cores", "ok", str(cores))


def _memory() -> Check:
    memory = psutil.virtual_memory()
    total, free = memory.total / _GIB, memory.available / _GIB
    found = f"{total:.1f} GiB, {free:.1f} GiB of it available"
    if free < _MEMORY_LEAST_GIB:
        return Check("memory", "fail", found, f"the whole loop needs up to {_MEMORY_LEAST_GIB:.0f} GiB: close other programs")
    return Check(
        "memory", "ok" if total >= _MEMORY_GIB * 0.9 else "warn", found, "" if total >= _MEMORY_GIB * 0.9 else "8 GiB would be safe"
    )


def _disk(data: Path) -> Check:
    free = shutil.disk_usage(_existing(data)).free / _GIB
    found = f"{free:.1f} GiB free for {data}"
    if free < _DISK_LEAST_GIB:
        return Check("disk", "fail", found, "make room, or set server.data to a folder on another disk")
    return Check("disk", "ok" if free >= _DISK_GIB else "warn", found, "" if free >= _DISK_GIB else f"{_DISK_GIB:.0f} GiB would be safe")


def _bf16() -> Check:
    flags = _cpu_flags()
    if flags is None:
        return Check("bfloat16", "ok", "not told by this system; the engine measures it at its start")
    if flags & _BF16_FLAGS:
        return Check("bfloat16", "ok", ", ".join(sorted(flags & _BF16_FLAGS)))
    return Check("bfloat16", "warn", "this CPU does not compute in bfloat16", "none needed: float32 is used, about three times slower")


def _cpu_flags() -> frozenset[str] | None:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    lines = [line.split(":", 1)[1] for line in text.splitlines() if line.startswith(("flags", "Features")) and ":" in line]
    return frozenset(lines[0].split()) if lines else None


def _ports(config: Config) -> list[Check]:
    checks = []
    for key, port in (("server.port", config.server.port), ("server.engine_port", config.server.engine_port)):
        free = port_free(config.server.host, port)
        fix = "" if free else f"a keepgrad that runs already, or another program: stop it, or set {key} in keepgrad.toml"
        checks.append(Check(key, "ok" if free else "warn", f"{config.server.host}:{port} is {'free' if free else 'taken'}", fix))
    return checks


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def model(config: Config) -> Check:
    """Whether the configured model is here and whole. Loads torch, and reads the weights once."""
    # Here, so that everything else of the doctor works on a machine without torch.
    try:
        from keepgrad.policy import model as models
    except ModuleNotFoundError as error:
        return Check("model", "warn", f"cannot look: the package {error.name} is missing", "pip install 'keepgrad[train]'")
    if config.model.path != models.DEFAULT:
        try:
            return Check("model", "ok", str(models.resolve(config.model.path)))
        except ModelError as error:
            return Check("model", "fail", config.model.path, str(error))
    folder = models.cache_folder() / models.DEFAULT
    if models.cached():
        return Check("model", "ok", f"{folder}, checksum verified")
    if folder.exists():
        return Check("model", "fail", f"{folder} is not what was fetched", f"delete {folder}, then keepgrad model fetch")
    return Check("model", "warn", f"{models.DEFAULT} has not been fetched yet", "keepgrad model fetch (100 MB, once)")
