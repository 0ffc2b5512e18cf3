"""Training: the loop, the engine beneath it, optimizer, schedule, checkpoints and metrics."""
