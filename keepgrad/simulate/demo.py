"""`keepgrad demo`: the four programs of a real installation on loopback, simulated developers as their users, and a report at the end.

    init      the data folder: base version, gate suite, traffic, keys          (once)
    engine    the model                                                         (until the end)
    serve     the gateway                                                       (until the cycles are over)
    simulate  developers                                                        (until the cycles are over)
    cycle     collect, score, audit, train, gate, canary, settle                (as many as fit)

Then base and final version answer the same held-out places, and the report is written. Nothing here is special to the demo except that the
developers are simulated: each program is the one a team would run, and talks to the others as it would there.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from keepgrad import __version__, config
from keepgrad.config import Config
from keepgrad.doctor import require_disk
from keepgrad.errors import ConfigError, KeepgradError
from keepgrad.ledger import Ledger
from keepgrad.policy.client import EngineClient
from keepgrad.report import write
from keepgrad.report.facts import DATA, EVALUATION, RUN, SETTINGS
from keepgrad.simulate.evaluate import evaluate
from keepgrad.simulate.progress import Progress, look
from keepgrad.supervise import Supervisor, interruptible, program
from keepgrad.up import LOGS, start_serving

KEYS = "developers.json"
_ORG = "demo"
_POLL_S = 0.5
_HELDOUT, _PROJECTS = 1040, 320
_EVALUATE_S = 270.0
"""Time kept free for the evaluation and the report."""
_MIN_CYCLES_S = 60.0
_DISK_GIB = 2.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `keepgrad demo` was asked for. `base` is the configuration that the demo's own starts from.

    >>> Options(out=Path("keepgrad-demo"), minutes=15.0, seed=0, cycles=6)
    """

    out: Path
    minutes: float = 15.0
    seed: int = 0
    cycles: int = 6
    developers: int = 48
    model: str = ""
    tiny: bool = False
    heldout: int = _HELDOUT
    """Places in held-out files that the evaluation asks, each under two versions."""
    projects: int = _PROJECTS
    """The same in projects never trained on."""
    base: Config = Config()


class Sizes(msgspec.Struct, frozen=True):
    """What differs between a real and a tiny run. Made by `_sizes`, eaten here.

    >>> Sizes(heldout=1040, projects=320, evaluate_s=270.0, concurrency=48)
    """

    heldout: int
    projects: int
    evaluate_s: float
    concurrency: int


def run(options: Options, console: Console | None = None) -> dict[str, Any]:
    """Run the whole demo; returns what report.json holds.

    Raises KeepgradError if a part dies for good, ConfigError for a folder that cannot be used.
    """
    out = console or Console(stderr=True)
    folder = options.out.expanduser().absolute()
    moved = _clear(folder)
    require_disk(folder, _DISK_GIB)
    folder.mkdir(parents=True, exist_ok=True)
    if moved:
        out.print(f"the run that was in {folder} is now in {moved}", highlight=False)
    with interruptible():
        settings = _settle(options, folder, out)
        record = _loop(options, settings, folder, out)
    _write(folder / RUN, json.dumps(record, indent=2))
    built = write.build(folder)
    write.show(built, folder, out)
    return built


def _loop(options: Options, settings: Config, folder: Path, out: Console) -> dict[str, Any]:
    """From the data folder to the evaluation, against the clock; returns the run record."""
    began_s, sizes = time.monotonic(), _sizes(options)
    deadline_s = began_s + 60 * options.minutes
    supervisor, seconds = Supervisor(), {}
    progress = Progress(out, options.cycles, settings.cycle.window, deadline_s, sizes.evaluate_s)
    try:
        with progress:
            progress.doing("making the data folder: base version, gate suite, keys")
            made = _init(options, folder)
            progress.doing("starting engine, gateway and developers")
            _start(settings, options, sizes, folder, supervisor)
            seconds["start"] = time.monotonic() - began_s
            _cycle(options, settings, sizes, folder, supervisor, progress, deadline_s)
            seconds["cycles"] = time.monotonic() - began_s - seconds["start"]
            final = _incumbent(settings)
            progress.doing(f"asking base and {final} at {sizes.heldout} + {sizes.projects} places that nobody trained on")
            answer = asyncio.run(_evaluate(settings, made["base"], final, sizes, options.seed, supervisor))
            seconds["evaluate"] = time.monotonic() - began_s - seconds["start"] - seconds["cycles"]
            _write(folder / EVALUATION, json.dumps(answer, indent=2))
            progress.doing("stopping the engine, writing the report")
    finally:
        supervisor.stop_all()
    return {
        "keepgrad": __version__,
        "seed": options.seed,
        "model": options.model or settings.model.path if not options.tiny else "tiny random model",
        "minutes": options.minutes,
        "cycles_asked": options.cycles,
        "developers": options.developers,
        "base": made["base"],
        "final": final,
        "seconds": round(time.monotonic() - began_s, 1),
        "seconds_by_phase": {name: round(value, 1) for name, value in seconds.items()},
        "restarts": dict(supervisor.restarts),
        "peak_memory_gib": supervisor.peak_gib,
        "cores": os.cpu_count(),
    }


# Before the clock starts ---------------------------------------------------------------------------------------------------------


def _clear(folder: Path) -> Path | None:
    """Move an earlier run out of the way; where to. Raises ConfigError if the folder holds something else."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    if not (folder / SETTINGS).exists():
        raise ConfigError(f"{folder} is not empty and holds no earlier run: give a new folder with --out")
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime((folder / SETTINGS).stat().st_mtime))
    moved = folder.with_name(f"{folder.name}-{stamp}")
    if moved.exists():
        raise ConfigError(f"{folder} holds an earlier run and {moved} is taken: move one of them away, or give another folder with --out")
    shutil.move(folder, moved)
    return moved


def _settle(options: Options, folder: Path, out: Console) -> Config:
    """Fetch or make the model, choose ports, write the run's configuration."""
    name = options.model or options.base.model.path
    if options.tiny:
        name = _keepgrad("model", "tiny", str(folder / "model"), "--json")["folder"]
    elif not name.startswith((".", "/", "~")):
        out.print(f"looking for the model {name} (fetched once, about 100 MB for the default)", highlight=False)
    settings = _configuration(options, folder, name)
    _write(folder / SETTINGS, config.dump(settings))
    _keepgrad("model", "fetch", "--config", str(folder / SETTINGS), "--json")
    return settings


def _configuration(options: Options, folder: Path, model: str) -> Config:
    """The run's configuration: the given one on free ports, in this folder; for a tiny run everything small."""
    gateway, engine = _free_ports(2)
    base, change = options.base, msgspec.structs.replace
    if options.tiny:
        base = change(
            base,
            model=change(base.model, dtype="float32", context_tokens=48, max_tokens=8),
            engine=change(base.engine, max_batch=32, threads=1),
            train=change(base.train, layers=0, minibatch=16),
            release=change(
                base.release, gate_contexts=24, gate_min_contexts=16, canary_share=0.5, canary_min=12, canary_max=24, holdback_share=0.1
            ),
            cycle=change(base.cycle, window=48, mature_s=20.0),
        )
    else:
        if base.release == config.Release():
            # Few users and little time: a canary that half of them meet and that ends soon. It mostly waits for conversations to end.
            base = change(base, release=change(base.release, canary_share=0.5, canary_min=24, canary_max=72))
        if base.cycle == config.Cycle():
            # Developers pause while a candidate trains: who has just left the editor settles when they are back, in the next window.
            base = change(base, cycle=change(base.cycle, mature_s=20.0))
    return change(
        base,
        model=change(base.model, path=model if not Path(model).expanduser().exists() else str(Path(model).expanduser().absolute())),
        server=change(base.server, data=str(folder / DATA), host="127.0.0.1", port=gateway, engine_port=engine),
        seed=options.seed,
    )


def _sizes(options: Options) -> Sizes:
    if options.tiny:
        return Sizes(heldout=64, projects=32, evaluate_s=20.0, concurrency=8)
    return Sizes(heldout=options.heldout, projects=options.projects, evaluate_s=_EVALUATE_S, concurrency=48)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    probes = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


# The parts -----------------------------------------------------------------------------------------------------------------------


def _init(options: Options, folder: Path) -> dict[str, Any]:
    """Make the data folder ready and keep the developers' secrets where only this user can read them."""
    users = [word for n in range(options.developers) for word in ("--user", f"dev-{n:02d}")]
    made = _keepgrad("init", "--config", str(folder / SETTINGS), "--org", _ORG, "--json", *users)
    secrets = [{"user": key["user"], "secret": key["secret"]} for key in made["keys"]]
    with os.fdopen(os.open(folder / KEYS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(secrets, file)
    return made


def _start(settings: Config, options: Options, sizes: Sizes, folder: Path, supervisor: Supervisor) -> None:
    start_serving(supervisor, settings, folder / SETTINGS, folder / LOGS)
    fleet = ["simulate", "--keys", str(folder / KEYS), "--seed", str(options.seed), "--concurrency", str(sizes.concurrency)]
    supervisor.start(program("developers", lambda: fleet, folder / SETTINGS, folder / LOGS, keep=True))


def _cycle(
    options: Options, settings: Config, sizes: Sizes, folder: Path, supervisor: Supervisor, progress: Progress, deadline_s: float
) -> None:
    """Run cycles until there are enough, or no other would be over in time; then let developers and gateway go."""

    def command() -> list[str]:  # after a crash: what is left of cycles and time
        budget_s = max(deadline_s - time.monotonic() - sizes.evaluate_s, _MIN_CYCLES_S)
        return ["cycle", "run", "--cycles", str(max(options.cycles - progress.finished, 1)), "--minutes", f"{budget_s / 60:.2f}"]

    supervisor.start(program("cycle", command, folder / SETTINGS, folder / LOGS, keep=False))
    ledger = Ledger.open(settings.root)
    try:
        while not supervisor.parts["cycle"].done:
            for name in supervisor.watch():
                progress.say(f"the {name} ended unexpectedly and was started again")
            progress.follow(ledger)
            time.sleep(_POLL_S)
        progress.follow(ledger)
    finally:
        ledger.close()
    for name in ("cycle", "developers", "gateway"):
        supervisor.stop(name)


async def _evaluate(settings: Config, base: str, final: str, sizes: Sizes, seed: int, supervisor: Supervisor) -> dict[str, Any]:
    """Ask the engine, while the parts go on being looked after."""
    engine = EngineClient(f"http://127.0.0.1:{settings.server.engine_port}", timeout_s=600.0)

    async def look_after() -> None:
        while True:
            supervisor.watch()
            await asyncio.sleep(_POLL_S)

    answering = asyncio.ensure_future(evaluate(settings, engine, base, final, sizes.heldout, sizes.projects, seed))
    watching = asyncio.ensure_future(look_after())
    try:
        await asyncio.wait([answering, watching], return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            watching.result()
        return await answering
    finally:
        for task in (answering, watching):
            task.cancel()
        await asyncio.gather(answering, watching, return_exceptions=True)
        await engine.close()


def _incumbent(settings: Config) -> str:
    ledger = Ledger.open(settings.root)
    try:
        return str(look(ledger)["incumbent"])
    finally:
        ledger.close()


# Small things --------------------------------------------------------------------------------------------------------------------


def _keepgrad(*arguments: str) -> dict[str, Any]:
    """One short command of ours, in a process of its own: torch stays out of this one. Raises KeepgradError with its sentence."""
    done = subprocess.run([sys.executable, "-m", "keepgrad", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1].removeprefix("keepgrad: ")
        raise KeepgradError(said)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    part.replace(path)
