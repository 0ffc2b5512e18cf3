"""Running a trained model on prompts: sampling, generation, streaming text."""

from megatron_essh.inference.generate import TextStream, generate, real_tokens
from megatron_essh.inference.sampling import SamplingConfig, draw, token_probabilities

__all__ = ["SamplingConfig", "TextStream", "draw", "generate", "real_tokens", "token_probabilities"]
