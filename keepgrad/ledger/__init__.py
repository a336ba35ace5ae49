"""The append-only store of everything the loop knows: tables and triggers in schema, token arrays in segments, the rest in store."""

from keepgrad.ledger.schema import SCHEMA_VERSION
from keepgrad.ledger.store import Ledger

__all__ = ["SCHEMA_VERSION", "Ledger"]
