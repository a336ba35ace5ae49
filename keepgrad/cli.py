"""The command line: arguments to calls, answers to text or JSON, errors to one sentence and an exit code.

What a command needs is imported when it runs, so that `keepgrad --help` needs neither torch nor a server.
"""

import argparse
import errno
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from keepgrad import __version__
from keepgrad.config import Config
from keepgrad.config import load as load_config
from keepgrad.errors import ConfigError, KeepgradError

_INTERRUPTED = 130
_HELP_WIDTH = 100

_ABOUT = """\
Keepgrad serves a code model, watches which suggestions people keep, and trains, gates and rolls out from that.

See it work on this machine:
  keepgrad demo

Run it yourself (each of the last three in a terminal or service of its own):
  keepgrad init --user ann          data folder, base version, gate suite, a key
  keepgrad engine                   the model
  keepgrad serve                    the front door that editors talk to
  keepgrad cycle run                collect, score, audit, train, gate, canary, settle, again and again
"""


def entry() -> NoReturn:
    """The console script."""
    sys.exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0 done, 1 the answer is no, 2 it could not be done, 130 interrupted."""
    arguments = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        code: int | None = arguments.run(arguments)
        sys.stdout.flush()
    except KeepgradError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # `keepgrad ... | head` is not an error
        sys.stderr.close()
        return 0
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("keepgrad"):
            raise
        return _complain(f"this command needs the package {error.name}: pip install 'keepgrad[all]', or make install in a clone", 2)
    except OSError as error:
        return _complain(_os_sentence(error), 2)
    return code or 0


def _complain(sentence: str, code: int) -> int:
    print(f"keepgrad: {sentence}", file=sys.stderr)
    return code


def _os_sentence(error: OSError) -> str:
    where = f" at {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full{where}: make room and run the command again; nothing acknowledged is lost"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"not allowed{where} ({error.strerror}): give this user the right to it, or name another folder"
    return f"the system refused{where} ({error.strerror or error}): mend that and run the command again"


# Commands ----------------------------------------------------------------------------------------------------------------------------


def _demo(a: argparse.Namespace) -> int:
    from keepgrad.simulate import demo

    options = demo.Options(
        out=a.out,
        minutes=a.minutes,
        seed=a.seed,
        cycles=a.cycles,
        developers=a.developers,
        model=a.model,
        tiny=a.tiny,
        heldout=a.heldout,
        projects=a.projects,
        base=_config(a),
    )
    report = demo.run(options)
    if a.json:
        _print_json(report)
    return 0


def _init(a: argparse.Namespace) -> int:
    from keepgrad import operate
    from keepgrad.doctor import require_disk
    from keepgrad.policy import engine, model

    config = _config(a)
    require_disk(model.cache_folder())
    fingerprint = model.fingerprint(model.resolve(config.model.path))
    made = operate.prepare(config, fingerprint, engine.base_files(), a.user, a.org, a.repo)
    if a.json:
        _print_json(made)
        return 0
    print(f"base version {made['base']}, {made['contexts']} gate contexts, data in {made['data']}")
    for key in made["keys"]:
        print(f"key of {key['user']}: {key['secret']}   (shown this once; only its hash is kept)")
    return 0


def _share_cores() -> None:
    """Let torch's idle threads sleep soon instead of spinning: engine and training share this machine's cores. Before torch is imported."""
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def _up(a: argparse.Namespace) -> int:
    from keepgrad import up

    up.run(_config(a), a.config, lambda sentence: print(sentence, flush=True), train=not a.no_training)
    return 0


def _engine(a: argparse.Namespace) -> int:
    _share_cores()
    from keepgrad.policy import server

    server.main(_config(a))
    return 0


def _serve(a: argparse.Namespace) -> int:
    from keepgrad.gateway import app

    app.main(_config(a))
    return 0


def _simulate(a: argparse.Namespace) -> int:
    from keepgrad.simulate import fleet

    counts = fleet.main(_config(a), a.keys, a.split, a.seed, a.concurrency, a.limit)
    if a.json:
        _print_json(counts)
    else:
        print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return 0


def _cycle_run(a: argparse.Namespace) -> int:
    _share_cores()
    from keepgrad import cycle

    return _cycles_done(cycle.run(_config(a), a.cycles, minutes=a.minutes), a.json)


def _cycle_resume(a: argparse.Namespace) -> int:
    _share_cores()
    from keepgrad import cycle

    return _cycles_done(cycle.resume(_config(a)), a.json)


def _cycle_status(a: argparse.Namespace) -> int:
    from keepgrad import cycle

    status = cycle.status(_config(a))
    if a.json:
        _print_json(status)
    else:
        _print_fields(status)
    return 0


def _audit(a: argparse.Namespace) -> int:
    from keepgrad import audit
    from keepgrad.ledger import Ledger
    from keepgrad.report import tables
    from keepgrad.reward import spec

    config = _config(a)
    ledger = Ledger.open(config.root)
    try:
        first, last = _window(ledger, a.window)
        report = audit.audit(ledger, spec.load(config.reward.spec), first, last)
    finally:
        ledger.close()
    answer = _plain(report) | {"problem_count": len(report.problems)}
    if a.json:
        _print_json(answer)
    else:
        print(f"{report.generations} generations: {tables.places(answer)}")
        for problem in report.problems:
            print(f"generation {problem['generation']}: {problem['problem']}")
        print("balanced" if report.balanced else f"NOT balanced: {len(report.problems)} problems")
    return 0 if report.balanced else 1


def _versions(a: argparse.Namespace) -> int:
    from keepgrad import operate

    rows = operate.versions(_config(a), verify=a.verify)
    if a.json:
        _print_json(rows)
    else:
        _print_table(("version", "parent", "window", "gate", "canary", "traffic"), rows)
    return 0


def _traffic_show(a: argparse.Namespace) -> int:
    from keepgrad import operate

    return _answer(operate.show_traffic(_config(a)), a.json)


def _traffic_set(a: argparse.Namespace) -> int:
    from keepgrad import operate

    return _answer(operate.set_traffic(_config(a), a.version, share=a.share, unjudged=a.unjudged, reason=a.reason), a.json)


def _traffic_rollback(a: argparse.Namespace) -> int:
    from keepgrad import operate

    return _answer(operate.rollback(_config(a), reason=a.reason), a.json)


def _export(a: argparse.Namespace) -> int:
    from keepgrad.export import export

    return _answer(export(_config(a), a.folder, a.org, a.user), a.json)


def _key_create(a: argparse.Namespace) -> int:
    from keepgrad import operate

    return _answer(operate.create_key(_config(a), a.user, a.org, a.consent, a.scope.split(",")), a.json)


def _key_revoke(a: argparse.Namespace) -> int:
    from keepgrad import operate

    return _answer(operate.revoke_key(_config(a), a.key, a.reason), a.json)


def _key_list(a: argparse.Namespace) -> int:
    from keepgrad import operate

    rows = operate.list_keys(_config(a))
    if a.json:
        _print_json(rows)
    else:
        _print_table(("id", "org", "user", "consent", "scopes", "revoked"), rows)
    return 0


def _model_fetch(a: argparse.Namespace) -> int:
    from keepgrad.doctor import require_disk
    from keepgrad.policy import model

    require_disk(model.cache_folder())
    folder = model.resolve(a.name or _config(a).model.path)
    return _answer({"folder": str(folder), "fingerprint": model.fingerprint(folder)}, a.json)


def _model_tiny(a: argparse.Namespace) -> int:
    from keepgrad.policy import model

    return _answer({"folder": str(model.make_tiny(a.folder.absolute(), a.seed))}, a.json)


def _suite(a: argparse.Namespace) -> int:
    from keepgrad import operate

    path, count = operate.write_suite(_config(a), repository=a.repo, count=a.count)
    return _answer({"suite": str(path), "contexts": count}, a.json)


def _report(a: argparse.Namespace) -> int:
    from keepgrad.report import write

    built = write.build(a.folder)
    if a.json:
        _print_json(built)
    else:
        write.show(built, a.folder)
    return 0


def _doctor(a: argparse.Namespace) -> int:
    from keepgrad import doctor

    config = _config(a)
    checks = [*doctor.examine(config), *([] if a.quick else [doctor.model(config)])]
    if a.json:
        _print_json(_plain(checks))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{check.level:4}  {check.name:{width}}  {check.found}" + (f"\n{'':{width + 8}}-> {check.fix}" if check.fix else ""))
    return 1 if any(check.level == "fail" for check in checks) else 0


def _config_show(a: argparse.Namespace) -> int:
    from keepgrad import manual

    print(manual.config_text(_config(a)), end="")
    return 0


# Arguments ---------------------------------------------------------------------------------------------------------------------------


class _Format(argparse.RawDescriptionHelpFormatter):
    """Help as written, at one width everywhere, so that the manual in docs/ is the same on every machine."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=_HELP_WIDTH)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser("keepgrad", description=_ABOUT, formatter_class=_Format)
    top.add_argument("--version", action="version", version=f"keepgrad {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_parts(commands)
    _add_cycle(commands)
    _add_books(commands)
    _add_traffic(commands)
    _add_material(commands)
    _add_help(commands)
    return top


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str, text: str, as_json: bool = True) -> Any:
    """One command: `about` in the list of commands, `text` (what it does, then examples) on its own page."""
    command = commands.add_parser(name, help=about, description=text.strip("\n"), formatter_class=_Format)
    command.set_defaults(run=run)
    command.add_argument("--config", metavar="FILE", help="configuration (default: ./keepgrad.toml if it is there)")
    if as_json:
        command.add_argument("--json", action="store_true", help="answer in JSON, for scripts")
    return command


def _group(commands: Any, name: str, about: str, text: str) -> Any:
    group = commands.add_parser(name, help=about, description=text.strip("\n"), formatter_class=_Format)
    return group.add_subparsers(title="commands", metavar="COMMAND", required=True)


def _add_demo(commands: Any) -> None:
    demo = _add(
        commands,
        "demo",
        _demo,
        "the whole loop on this machine, from nothing to a report",
        """
Starts engine, gateway, cycle and simulated developers as separate programs on free ports of this
machine, lets the developers type real Python code, and trains on what they keep. Ends with a table
before and after, plots, and report.html. Interrupt it at any time; nothing is left running.

  keepgrad demo
  keepgrad demo --minutes 30 --cycles 10 --out runs/long
  keepgrad demo --seed 1 --model ./my-model
""",
    )
    demo.add_argument(
        "--out", type=Path, default=Path("keepgrad-demo"), metavar="DIR", help="new or finished run folder (default: %(default)s)"
    )
    demo.add_argument("--minutes", type=_positive_float, default=15.0, metavar="M", help="time for everything (default: %(default)g)")
    demo.add_argument("--seed", type=int, default=0, metavar="S", help="seed of developers and training (default: %(default)s)")
    demo.add_argument(
        "--cycles", type=_positive_int, default=6, metavar="N", help="most cycles; fewer if the time is short (default: %(default)s)"
    )
    demo.add_argument("--developers", type=_positive_int, default=48, metavar="N", help="simulated developers (default: %(default)s)")
    demo.add_argument(
        "--heldout", type=_positive_int, default=1040, metavar="N", help="places in held-out files to judge on (default: %(default)s)"
    )
    demo.add_argument(
        "--projects", type=_positive_int, default=320, metavar="N", help="places in other projects to judge on (default: %(default)s)"
    )
    demo.add_argument("--model", default="", metavar="PATH", help="model folder or hub name instead of the default model")
    demo.add_argument("--tiny", action="store_true", help="a tiny random model and small sizes: shows that the parts fit, learns nothing")


def _add_parts(commands: Any) -> None:
    init = _add(
        commands,
        "init",
        _init,
        "make the data folder: base version, gate suite, traffic, keys",
        """
Fetches the model if need be, stores it as the base version, cuts contexts for the offline gate, gives
the base all traffic and makes a key for each user named. Safe to run again: what is there stays.

  keepgrad init --user ann --user bob
  keepgrad init --user ann --repo ~/code/project     gate contexts from your own repository
""",
    )
    init.add_argument("--user", action="append", default=[], metavar="NAME", help="make a key for this user (may be given again)")
    init.add_argument("--org", default="default", metavar="NAME", help="organisation of the keys (default: %(default)s)")
    init.add_argument("--repo", type=Path, metavar="DIR", help="cut gate contexts from the Python files of this folder")
    family = _add(
        commands,
        "up",
        _up,
        "engine, gateway and training loop together (until interrupted)",
        """
Starts the three as programs of their own, watches them, starts again what dies, and stops them in the
order that loses nothing. Their output goes to logs/ in the data folder. Run `keepgrad init` once before.

  keepgrad up
  keepgrad up --config team.toml
  keepgrad up --no-training          serve and record only; `keepgrad cycle run` trains when you like
""",
        as_json=False,
    )
    family.add_argument("--no-training", action="store_true", help="no training loop")
    _add(
        commands,
        "engine",
        _engine,
        "serve the model on loopback, for the gateway (until interrupted)",
        """
Loads the base model and answers the gateway and the gate: batches concurrent requests, keeps several
versions side by side, returns each token's log-probability. Listens on server.engine_port.
""",
        as_json=False,
    )
    _add(
        commands,
        "serve",
        _serve,
        "the front door that editors talk to (until interrupted)",
        """
Answers POST /v1/keepgrad/tab and POST /v1/keepgrad/events, checks keys and consent, writes generations
and events to the ledger before it acknowledges them. Needs a running engine. Listens on server.port.
""",
        as_json=False,
    )
    simulate = _add(
        commands,
        "simulate",
        _simulate,
        "developers made of real code, as HTTP clients of a running gateway",
        """
Simulated developers type real files, ask for suggestions and accept, reject, rework or ignore them. They
are a stand-in for people: good for exercising the loop, no evidence that people behave so.

  keepgrad simulate --keys developers.json
  keepgrad simulate --keys developers.json --limit 200 --seed 3
""",
    )
    simulate.add_argument("--keys", type=Path, required=True, metavar="FILE", help="JSON list of {user, secret}")
    simulate.add_argument(
        "--split", choices=("train", "gate", "heldout", "projects"), default="train", help="files they type (default: %(default)s)"
    )
    simulate.add_argument("--seed", type=int, default=0, metavar="S", help="seed (default: %(default)s)")
    simulate.add_argument(
        "--concurrency", type=_positive_int, default=16, metavar="N", help="developers at work at once (default: %(default)s)"
    )
    simulate.add_argument("--limit", type=int, default=0, metavar="N", help="stop after so many opportunities; 0: never (default)")


def _add_cycle(commands: Any) -> None:
    group = _group(
        commands,
        "cycle",
        "run the learning loop, look at it, or go on after a crash",
        "One cycle: collect, score, audit, train, gate, canary, settle. Each step is finished at most once.",
    )
    run = _add(
        group,
        "run",
        _cycle_run,
        "run cycles",
        """
Collects a window from live traffic, trains a candidate on it, gates it, tries it on a share of users and
promotes it or rolls it back. Needs a running engine and gateway. Serving never stops for it.

  keepgrad cycle run --cycles 1
  keepgrad cycle run --minutes 60    begin none that would not be over in time
  keepgrad cycle run                 until interrupted
""",
    )
    run.add_argument("--cycles", type=int, default=0, metavar="N", help="stop after so many; 0: never (default)")
    run.add_argument("--minutes", type=float, default=0.0, metavar="M", help="begin no cycle that would take longer; 0: no limit (default)")
    _add(group, "status", _cycle_status, "where the loop is", "The running cycle and its stage, finished cycles, and what each decided.")
    _add(
        group,
        "resume",
        _cycle_resume,
        "go on after a crash, from the last finished step",
        "Finishes the cycle that was cut off: steps that had finished are not done again, no sample is trained twice.",
    )


def _add_books(commands: Any) -> None:
    audit = _add(
        commands,
        "audit",
        _audit,
        "prove that every generation served is in exactly one place",
        """
Every generation served is rewarded, pending, censored or excluded, for a stated reason, and the counts
add up. Exit code 0 when they do; 1 when they do not, and the generations at fault are named.

  keepgrad audit
  keepgrad audit --window w-000003 --json
""",
    )
    audit.add_argument("--window", default="", metavar="ID", help="one training window (default: everything ever served)")
    versions = _add(
        commands,
        "versions",
        _versions,
        "policy versions, their lineage and verdicts",
        """
Versions are immutable and content-addressed. Shows each with its parent, the window it learned from, and
what the gate and the canary decided.
""",
    )
    versions.add_argument("--verify", action="store_true", help="also read every file and compare checksums")
    report = _add(
        commands,
        "report",
        _report,
        "rebuild the report of a demo run",
        """
Reads the ledger and the evaluation in a run folder and writes report.json, report.html and the plots anew.

  keepgrad report keepgrad-demo
""",
    )
    report.add_argument("folder", type=Path, metavar="DIR", help="run folder of a demo")


def _add_traffic(commands: Any) -> None:
    group = _group(
        commands,
        "traffic",
        "which version answers whom",
        "Traffic is one record, read at every request: the newest counts, older ones stay as history.",
    )
    _add(group, "show", _traffic_show, "the record in force", "Incumbent, canary and holdback with their shares, and why.")
    put = _add(
        group,
        "set",
        _traffic_set,
        "give a version all traffic or a share of it",
        """
The version must have passed the gate (the base needs no verdict).

  keepgrad traffic set v-3f2a9c0d11e2b4a7               all traffic but the holdback
  keepgrad traffic set v-3f2a9c0d11e2b4a7 --share 0.1   as canary, for a tenth of the users
""",
    )
    put.add_argument("version", metavar="VERSION")
    put.add_argument("--share", type=_share, default=1.0, metavar="X", help="share of users, above 0 to 1 (default: all)")
    put.add_argument("--unjudged", action="store_true", help="allow a version without a passed gate")
    put.add_argument("--reason", default="set by hand", metavar="TEXT", help="kept in the record")
    back = _add(
        group,
        "rollback",
        _traffic_rollback,
        "back to the version before, at once",
        "Takes effect with the next request, in open conversations too. With a canary running: ends the canary.",
    )
    back.add_argument("--reason", default="rolled back by hand", metavar="TEXT", help="kept in the record")


def _add_material(commands: Any) -> None:
    group = _group(commands, "key", "keys of users", "A key says who asks, for which organisation, and what may be kept of it.")
    add = _add(
        group,
        "create",
        _key_create,
        "make a key; its secret is shown once",
        """
Consent is enforced before anything is written: none serves and keeps nothing, metadata keeps no code, code
keeps it with secrets redacted.

  keepgrad key create --user ann
  keepgrad key create --user bob --consent metadata
  keepgrad key create --user prometheus --scope admin
""",
    )
    add.add_argument("--user", required=True, metavar="NAME", help="whose key it is")
    add.add_argument("--org", default="default", metavar="NAME", help="organisation (default: %(default)s)")
    add.add_argument("--consent", choices=("none", "metadata", "code"), default="code", help="what may be kept (default: %(default)s)")
    add.add_argument("--scope", default="serve,events", metavar="LIST", help="out of serve, events, admin (default: %(default)s)")
    _add(group, "list", _key_list, "every key, without its secret", "Every key, without its secret.")
    revoke = _add(
        group,
        "revoke",
        _key_revoke,
        "end a key",
        "A running gateway refuses it within a second. What its user did stays in the books; a key that was revoked stays so.",
    )
    revoke.add_argument("key", metavar="KEY", help="its id, e.g. k-12ab")
    revoke.add_argument("--reason", default="revoked by hand", metavar="TEXT", help="kept in the record")
    out = _add(
        commands,
        "export",
        _export,
        "what the ledger holds, as Parquet files",
        """
Writes generations, tokens, events and scores, and for the whole ledger also versions, traffic and verdicts,
one Parquet file each, into a new folder. Keys are left out. The ledger may be in use.

  keepgrad export everything
  keepgrad export hers --org acme --user ann
""",
    )
    out.add_argument("folder", type=Path, metavar="DIR", help="a new folder")
    out.add_argument("--org", default="", metavar="NAME", help="only what was served to this organisation")
    out.add_argument("--user", default="", metavar="NAME", help="only what was served to this user of it")
    group = _group(commands, "model", "model folders", "The model that is served and trained.")
    fetch = _add(
        group,
        "fetch",
        _model_fetch,
        "fetch the model once and verify it",
        """
The default model is SmolLM2-135M-Instruct (Apache-2.0, about 100 MB), kept in the user's cache folder.

  keepgrad model fetch
  keepgrad model fetch ./my-model          only checks that the folder can be used
""",
    )
    fetch.add_argument("name", nargs="?", default="", metavar="PATH", help="folder or hub name (default: model.path of the configuration)")
    tiny = _add(
        group,
        "tiny",
        _model_tiny,
        "write a tiny random model, for dry runs",
        """
A real Llama of about 100,000 random parameters with its own tokenizer: every part works with it, fast,
and nothing sensible comes out.

  keepgrad model tiny ./tiny
""",
    )
    tiny.add_argument("folder", type=Path, metavar="DIR", help="new folder")
    tiny.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the weights (default: %(default)s)")
    suite = _add(
        commands,
        "suite",
        _suite,
        "cut the contexts that the offline gate asks",
        """
Places in real code where a developer would pause, with what really stands there. Cut them from code that
nothing trains on. Replaces the suite in the data folder.

  keepgrad suite                           from the Python installed here
  keepgrad suite --repo ~/code/project     from your own repository
""",
    )
    suite.add_argument("--repo", type=Path, metavar="DIR", help="cut from the Python files of this folder")
    suite.add_argument("--count", type=_positive_int, default=0, metavar="N", help="contexts (default: enough for several gates)")


def _add_help(commands: Any) -> None:
    doctor = _add(
        commands,
        "doctor",
        _doctor,
        "what this machine has and lacks, and how to get it",
        "Exit code 1 if something is missing that nothing works without.",
    )
    doctor.add_argument("--quick", action="store_true", help="do not look at the model (saves loading torch and a checksum)")
    _add(
        commands,
        "config",
        _config_show,
        "every configuration key, its value and what it is",
        """
Prints the configuration in force as TOML: a complete keepgrad.toml.

  keepgrad config > keepgrad.toml
""",
        as_json=False,
    )


# Answers -----------------------------------------------------------------------------------------------------------------------------


def _config(a: argparse.Namespace) -> Config:
    return load_config(a.config)


def _window(ledger: Any, name: str) -> tuple[int, int | None]:
    """The sequence numbers of a window; the whole ledger without a name."""
    if not name:
        return 1, None
    windows = {window.id: window for window in ledger.windows()}
    if name not in windows:
        raise ConfigError(f"there is no window {name}: name one of {', '.join(windows) or 'none yet'}, or leave --window out")
    return windows[name].first_seq, windows[name].last_seq


def _cycles_done(rows: Any, as_json: bool) -> int:
    if as_json:
        _print_json(rows)
    elif isinstance(rows, list):
        for row in rows:
            print(row if isinstance(row, str) else ", ".join(f"{name} {value}" for name, value in _plain(row).items()))
    return 0


def _answer(fields: dict[str, Any], as_json: bool) -> int:
    if as_json:
        _print_json(fields)
    else:
        _print_fields(fields)
    return 0


def _print_fields(fields: dict[str, Any]) -> None:
    width = max((len(name) for name in fields), default=0)
    for name, value in fields.items():
        print(f"{name:{width}}  {value if not isinstance(value, dict | list) else json.dumps(value)}")


def _print_table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) if cells else len(column) for i, column in enumerate(columns)]
    for line in [list(columns), *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _print_json(value: Any) -> None:
    print(json.dumps(_plain(value), indent=2))


def _plain(value: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(value, str_keys=True)


def _positive_int(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _positive_float(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _share(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value
