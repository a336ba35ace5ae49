"""The front door: HTTP in, version choice, consent, and everything durable in the ledger before it is answered."""
