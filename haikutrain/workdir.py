"""The folder of a run: whose it is, and where things are in it."""

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from haikutrain.errors import UsageError


def experiment_name(kind: type) -> str:
    """How a run names its experiment: `file:Class`, or `:Class` for one defined in a notebook."""
    module = kind.__module__.replace(":", ".").rpartition(".")[2]
    return f"{'' if module in ('__main__', 'builtins') else module}:{kind.__qualname__}"


def same_experiment(a: str, b: str) -> bool:
    """Whether two names may be of one experiment: a notebook may go on with a file's run."""
    (module_a, _, class_a), (module_b, _, class_b) = a.partition(":"), b.partition(":")
    return class_a == class_b and (module_a == module_b or "" in (module_a, module_b))


def write_rows(path: str | os.PathLike[str], splits: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes an npz file with an array `<split>/<name>` for each; all of it or nothing."""
    arrays = {f"{split}/{name}": a for split, rows in splits.items() for name, a in rows.items()}
    target = pathlib.Path(path)
    new = target.with_name(f"{target.name}.tmp")
    try:
        with new.open("wb") as file:
            np.savez(file, **arrays)
        new.replace(target)
    except OSError as error:
        raise UsageError(f"predictions cannot be written to {path}: {error.strerror}") from error


class Workdir:
    """Paths of a run's folder. Nothing is created before `claim`.

    Args:
      path: of the folder.

    Raises:
      UsageError: the path is a file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path).absolute()
        # `Path.exists` raises where a folder above may not be entered.
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise UsageError(f"workdir {path} is a file; name a folder with --workdir")
        self.config = self.path / "config.json"
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.metrics_eval = self.path / "metrics_eval.jsonl"
        self.media = self.path / "media"
        self.tensorboard = self.path / "tensorboard"

    def check_owner(self, experiment: str) -> None:
        """Raises UsageError if another experiment's run is here."""
        try:
            owner = json.loads(self.config.read_text())["experiment"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        if not same_experiment(owner, experiment):
            raise UsageError(
                f"workdir {self.path} holds a run of {owner}, and this is {experiment}; give "
                "another --workdir"
            )

    def check_writable(self) -> None:
        """Raises UsageError if the folder can be neither written nor created."""
        parent = next(p for p in (self.path, *self.path.parents) if os.path.exists(p))
        try:
            with contextlib.suppress(FileNotFoundError):
                os.stat(self.path)  # Raises for a name that is too long.
            with tempfile.TemporaryFile(dir=parent):
                pass
        except OSError as error:
            raise UsageError(
                f"workdir {self.path} cannot be written ({error.strerror}: {parent}); give another "
                "--workdir"
            ) from error

    def claim(self, experiment: str, config: Mapping[str, Any], overrides: Sequence[str]) -> None:
        """Creates the folder and writes down what runs in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        content = {"experiment": experiment, "config": config, "overrides": list(overrides)}
        new = self.config.with_suffix(".tmp")
        new.write_text(json.dumps(content, indent=2) + "\n")
        new.replace(self.config)
