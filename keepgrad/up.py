"""`keepgrad up`: engine, gateway and training loop as one family of programs on this machine, looked after until told to stop.

Engine and gateway are vital: if one does not stay up, everything ends with what it said. The training loop is not: serving goes on without
it, and it is tried again each minute.
"""

import time
from collections.abc import Callable
from pathlib import Path

from keepgrad.config import Config
from keepgrad.errors import ConfigError
from keepgrad.ledger import Ledger
from keepgrad.supervise import Supervisor, interruptible, program, wait_ready

LOGS = "logs"
_POLL_S = 0.5


def run(config: Config, settings: Path | None, tell: Callable[[str], None], train: bool = True) -> None:
    """Run until SIGINT, SIGTERM or SIGHUP; `settings` is the file that `config` came from, if any; `tell` hears what a person should know.

    Raises ConfigError if the data folder was not made, KeepgradError if engine or gateway do not stay up.
    """
    _check(config)
    logs, supervisor = config.root / LOGS, Supervisor()
    try:
        with interruptible():
            tell(f"starting; logs are in {logs}")
            start_serving(supervisor, config, settings, logs)
            if train:
                supervisor.start(program("cycle", lambda: ["cycle", "run"], settings, logs, keep=True, vital=False))
            tell(f"keepgrad answers at http://{_host(config)}:{config.server.port}; Ctrl-C stops it")
            while True:
                for name in supervisor.watch():
                    tell(f"the {name} ended unexpectedly and was started again: see {logs / name}.log")
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        tell("stopping")
    finally:
        supervisor.stop_all()


def start_serving(supervisor: Supervisor, config: Config, settings: Path | None, logs: Path) -> None:
    """Start engine and gateway, each once the one before answers. Raises KeepgradError if one does not."""
    supervisor.start(program("engine", lambda: ["engine"], settings, logs, keep=True))
    wait_ready(supervisor, "engine", f"http://127.0.0.1:{config.server.engine_port}/status")
    supervisor.start(program("gateway", lambda: ["serve"], settings, logs, keep=True))
    near = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(_host(config), _host(config))
    wait_ready(supervisor, "gateway", f"http://{near}:{config.server.port}/healthz")


def _host(config: Config) -> str:
    """The gateway's address as it stands in a URL."""
    return f"[{config.server.host}]" if ":" in config.server.host else config.server.host


def _check(config: Config) -> None:
    if not (config.root / "ledger.sqlite").exists():
        raise ConfigError(f"there is no ledger in {config.root}: make the data folder with `keepgrad init --user NAME` first")
    ledger = Ledger.open(config.root)
    try:
        if ledger.traffic() is None:
            raise ConfigError(f"no version has traffic in {config.root}: make the data folder with `keepgrad init --user NAME` first")
    finally:
        ledger.close()
