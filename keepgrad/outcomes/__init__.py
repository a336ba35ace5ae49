"""What became of a generation, computed from the ledger and a clock, never stored as truth: episode (Tab, joined by time)."""
