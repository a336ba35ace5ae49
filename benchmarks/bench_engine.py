"""The embedded engine on the default model: drafts a second by callers at once, as ratios to one caller in the same run."""

import asyncio
import tempfile
import time
from pathlib import Path

from keepgrad.config import Config, Server
from keepgrad.policy.engine import Engine, base_files
from keepgrad.policy.versions import Store
from keepgrad.records import EngineRequest, Sampling


async def drafts(engine: Engine, version: str, callers: int, count: int) -> float:
    """Drafts a second with `callers` requests always under way."""
    source = Path(__file__).read_text()
    ids, healed = engine.prompter.encode(source, 128)
    turns = iter(range(count))

    async def caller() -> None:
        for seed in turns:
            await engine.generate(EngineRequest(ids, [version], seed, Sampling(), healed))

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return count / (time.perf_counter() - began)


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config(server=Server(data=folder))
        store = Store(config.root)
        version = store.write(base_files(), parent="", model="", window="", spec="", seed=0).id
        engine = Engine(config, store)
        engine.start()
        first = 0.0
        print(f"{'callers':>8} {'drafts/s':>9} {'ratio':>6}")
        for callers, count in ((1, 8), (8, 48), (32, 96), (64, 128)):
            rate = asyncio.run(drafts(engine, version, callers, count))
            first = first or rate
            print(f"{callers:>8} {rate:>9.1f} {rate / first:>6.1f}")
        engine.stop()


if __name__ == "__main__":
    main()
