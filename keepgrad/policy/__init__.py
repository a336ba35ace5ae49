"""The model and what it says: weights and tokenizer, prompts, silence, engines, and versions on disk."""
