"""Stateful training for Haiku: write the loss, stop anywhere, resume exactly."""

from haikutrain import augment, readers
from haikutrain.checkpoint import CheckpointDamaged, digest
from haikutrain.collectives import AXIS, pmean, psum
from haikutrain.config import base_config
from haikutrain.data import ArrayDataset, digits
from haikutrain.errors import UsageError
from haikutrain.experiment import Experiment
from haikutrain.hooks import StepInfo, every
from haikutrain.leaves import take
from haikutrain.metrics import Rows
from haikutrain.optimizers import (
    decay_mask,
    ema,
    freeze,
    make_optimizer,
    mask_by_name,
    optimizer_config,
    scale_by_learning_rate,
)
from haikutrain.pictures import grid
from haikutrain.pipeline import GrainDataset
from haikutrain.schedules import epochs, warmup_constant, warmup_cosine, warmup_linear
from haikutrain.train import ReplicasDiffer, evaluate, restore, train
from haikutrain.train_state import TrainState
from haikutrain.updates import apply_gradients, averaged, step
from haikutrain.writers import MetricWriter

__all__ = [
    "AXIS",
    "ArrayDataset",
    "CheckpointDamaged",
    "Experiment",
    "GrainDataset",
    "MetricWriter",
    "ReplicasDiffer",
    "Rows",
    "StepInfo",
    "TrainState",
    "UsageError",
    "apply_gradients",
    "augment",
    "averaged",
    "base_config",
    "decay_mask",
    "digest",
    "digits",
    "ema",
    "epochs",
    "evaluate",
    "every",
    "freeze",
    "grid",
    "make_optimizer",
    "mask_by_name",
    "optimizer_config",
    "pmean",
    "psum",
    "readers",
    "restore",
    "scale_by_learning_rate",
    "step",
    "take",
    "train",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
]
