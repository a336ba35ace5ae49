"""The gateway's Prometheus metrics, in a registry of their own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Meters:
    """One gateway's meters."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("keepgrad_requests", "Requests answered", ["route", "status"], registry=self.registry)
        self.generations = Counter("keepgrad_generations", "Generations served", ["version", "arm", "verdict"], registry=self.registry)
        self.repeats = Counter("keepgrad_repeats", "Requests answered from the ledger, having been served before", registry=self.registry)
        self.events = Counter("keepgrad_events", "Events acknowledged", ["kind", "result"], registry=self.registry)
        self.redacted = Counter("keepgrad_redacted_secrets", "Secrets taken out of prompts and events", registry=self.registry)
        self.waiting = Gauge("keepgrad_waiting_events", "Events that are not on disk yet", registry=self.registry)
        self.tab_s = Histogram("keepgrad_tab_seconds", "Time to a durable answer", buckets=_SECONDS, registry=self.registry)
        self.commit_s = Histogram("keepgrad_commit_seconds", "Time of one ledger transaction", buckets=_SECONDS, registry=self.registry)
        self.commit_rows = Histogram("keepgrad_commit_rows", "Rows that shared one transaction", buckets=_ROWS, registry=self.registry)

    def commit(self, rows: int, seconds: float) -> None:
        """Note one ledger transaction."""
        self.commit_rows.observe(rows)
        self.commit_s.observe(seconds)

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
