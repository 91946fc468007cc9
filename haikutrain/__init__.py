"""Stateful training for Haiku: write the loss, stop anywhere, resume exactly."""

import importlib
from typing import Any

# Where each public name is from. Imported when first used: the command line answers before JAX is
# there, and catches signals first. `__init__.pyi` says the same to type checkers.
_HOMES = {
    "AXIS": "collectives",
    "ArrayDataset": "data",
    "CheckpointDamaged": "errors",
    "CheckpointUnreadable": "errors",
    "Experiment": "experiment",
    "GrainDataset": "pipeline",
    "MetricWriter": "writers",
    "NonFinite": "errors",
    "PeerLost": "errors",
    "ReplicasDiffer": "saving",
    "Rows": "metrics",
    "SavesFailed": "errors",
    "StepInfo": "hooks",
    "Stopped": "errors",
    "TrainState": "train_state",
    "UsageError": "errors",
    "apply_gradients": "updates",
    "augment": "",
    "averaged": "updates",
    "base_config": "config",
    "decay_mask": "optimizers",
    "digest": "leaves",
    "digits": "data",
    "ema": "optimizers",
    "epochs": "schedules",
    "evaluate": "loop",
    "every": "hooks",
    "freeze": "optimizers",
    "grid": "pictures",
    "make_optimizer": "optimizers",
    "mask_by_name": "optimizers",
    "optimizer_config": "optimizers",
    "pmean": "collectives",
    "psum": "collectives",
    "readers": "",
    "restore": "loop",
    "scale_by_learning_rate": "optimizers",
    "step": "updates",
    "take": "leaves",
    "train": "loop",
    "warmup_constant": "schedules",
    "warmup_cosine": "schedules",
    "warmup_linear": "schedules",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'haikutrain' has no attribute {name!r}")
    home = _HOMES[name]
    module = importlib.import_module(f"haikutrain.{home or name}")
    value = getattr(module, name) if home else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
