"""The model and what it says: weights and tokenizer, prompts, verdicts, engines, and versions on disk."""
