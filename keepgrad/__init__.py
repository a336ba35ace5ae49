"""keepgrad: keep improving a coding model from what its own users do with its output."""

__version__ = "0.1.0"
