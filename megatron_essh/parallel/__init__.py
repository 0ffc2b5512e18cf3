"""Tensor and data parallelism: who holds what, and what is exchanged. The model's files know nothing of it."""
