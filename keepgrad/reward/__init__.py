"""Outcome to number: spec (a hashed TOML file), terms (pure functions, each with the exploit it closes), score (places, rewards, batch)."""
