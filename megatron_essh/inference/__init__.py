"""Running a trained model on prompts: decode steps, slots, sampling, generation, streaming text."""

from megatron_essh.inference.engine import Engine
from megatron_essh.inference.generate import Request, StopStrings, TextStream, generate, generate_many, real_tokens
from megatron_essh.inference.sampling import SamplingConfig, draw, token_probabilities

__all__ = [
    "Engine",
    "Request",
    "SamplingConfig",
    "StopStrings",
    "TextStream",
    "draw",
    "generate",
    "generate_many",
    "real_tokens",
    "token_probabilities",
]
