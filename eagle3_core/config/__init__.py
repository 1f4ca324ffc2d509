"""What the user decides: closed, frozen sections, validated before anything runs."""

from eagle3_core.config.base import Section
from eagle3_core.config.data import CaptureConfig, DataConfig
from eagle3_core.config.drafter import DrafterConfig
from eagle3_core.config.evaluation import DraftShape, EvaluationConfig, GateConfig
from eagle3_core.config.run import RunConfig
from eagle3_core.config.serving import EngineArg, ServingConfig
from eagle3_core.config.target import TargetConfig
from eagle3_core.config.training import TrainingConfig

__all__ = [
    "CaptureConfig",
    "DataConfig",
    "DraftShape",
    "DrafterConfig",
    "EngineArg",
    "EvaluationConfig",
    "GateConfig",
    "RunConfig",
    "Section",
    "ServingConfig",
    "TargetConfig",
    "TrainingConfig",
]
