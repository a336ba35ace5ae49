"""What a run amounts to, out of its ledger, its evaluation and its run record."""
