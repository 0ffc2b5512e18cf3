"""Configuration: one dataclass per component, read from YAML files composed by `base:`."""

from megatron_essh.config.components import (
    BatchRampConfig,
    CheckpointConfig,
    DataConfig,
    ElasticConfig,
    OptimizerConfig,
    ParallelConfig,
    RefinementConfig,
    RunConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron_essh.config.loader import config_from_mapping, config_to_mapping, load_config
from megatron_essh.config.model import ModelConfig

__all__ = [
    "BatchRampConfig",
    "CheckpointConfig",
    "DataConfig",
    "ElasticConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RefinementConfig",
    "RunConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "config_from_mapping",
    "config_to_mapping",
    "load_config",
]
