"""One on-policy step: batch of samples to tensors, the loss beside its formula, and the worker that takes the step."""
