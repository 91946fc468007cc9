"""Stateful training for Haiku: write the loss, stop anywhere, resume exactly."""

from haikutrain.checkpoint import CheckpointDamaged, digest
from haikutrain.collectives import AXIS, pmean, psum
from haikutrain.config import base_config
from haikutrain.data import ArrayDataset, digits
from haikutrain.errors import UsageError
from haikutrain.experiment import Experiment, apply_gradients, averaged, step
from haikutrain.hooks import StepInfo, every
from haikutrain.optimizers import (
    decay_mask,
    make_optimizer,
    mask_by_name,
    optimizer_config,
    scale_by_learning_rate,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
)
from haikutrain.train import ReplicasDiffer, evaluate, restore, train
from haikutrain.train_state import TrainState
from haikutrain.writers import MetricWriter

__all__ = [
    "AXIS",
    "ArrayDataset",
    "CheckpointDamaged",
    "Experiment",
    "MetricWriter",
    "ReplicasDiffer",
    "StepInfo",
    "TrainState",
    "UsageError",
    "apply_gradients",
    "averaged",
    "base_config",
    "decay_mask",
    "digest",
    "digits",
    "evaluate",
    "every",
    "make_optimizer",
    "mask_by_name",
    "optimizer_config",
    "pmean",
    "psum",
    "restore",
    "scale_by_learning_rate",
    "step",
    "train",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
]
