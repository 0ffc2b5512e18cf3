"""Elastic Selective Spectral Hybrid language models: train one, export many sizes.

A config builds a model; a capacity picks a prefix of it; a plan says which capacity each micro-batch uses; an
engine steps it; a checkpoint holds it without layout; an export is a slice.
"""

from megatron_essh.version import __version__

__all__ = ["__version__"]
