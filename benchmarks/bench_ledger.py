"""Durable writes and reads of the ledger: rows a second in batches of 1, 10 and 100, as ratios to batches of 1 in the same run."""

import tempfile
import time
from pathlib import Path

from keepgrad.ledger import Ledger
from keepgrad.records import Event, Generation, Sampling, Tokens, uuid7


def generation(index: int) -> tuple[Generation, Tokens]:
    """One generation of ordinary size with its arrays."""
    name = uuid7()
    made = Generation(
        id=name, kind="tab", org="o", user=f"u{index % 24}", key="k", conversation=f"c{index // 10}", version="v-base", arm="incumbent",
        consent="code", seed=index, sampling=Sampling(), prompt_tokens=128, completion_tokens=9, verdict="show", verdict_logprob=-0.1,
        show_probability=0.9, finish="stop", text="return self.value", path="a.py", client_ms=index, created_ms=index, latency_ms=80.0,
    )  # fmt: skip
    return made, Tokens(name, [7] * 128, [3] * 9, [-0.3] * 9, [2, 5, 9], [[0.1] * 15] * 3)


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.open(Path(folder))
        first = 0.0
        print(f"{'batch':>6} {'generations/s':>14} {'events/s':>10} {'ratio':>6}")
        for batch in (1, 10, 100):
            made = [generation(index) for index in range(max(200, 10 * batch))]
            began = time.perf_counter()
            for at in range(0, len(made), batch):
                ledger.add_generations(made[at : at + batch])
            generations = len(made) / (time.perf_counter() - began)
            events = [(Event(uuid7(), one.id, "shown", 1), "k") for one, _ in made]
            began = time.perf_counter()
            for at in range(0, len(events), batch):
                ledger.add_events(events[at : at + batch])
            told = len(events) / (time.perf_counter() - began)
            first = first or told
            print(f"{batch:>6} {generations:>14.0f} {told:>10.0f} {told / first:>6.1f}")
        ledger.close()


if __name__ == "__main__":
    main()
