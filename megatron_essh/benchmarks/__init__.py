"""What tools/benchmark.py measures: whole training steps, their parts, and the mixer's scan."""
