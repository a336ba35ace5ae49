"""What a candidate must pass before it serves: suite (contexts with known answers), gate (offline), canary (online)."""
