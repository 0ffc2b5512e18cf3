"""Operators: one folder each, a plain PyTorch reference beside the fast versions behind one function."""

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether Triton can be imported. Looked up once: operators ask at every call."""
