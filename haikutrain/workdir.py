"""The folder of a run: whose it is, and where things are in it."""

import json
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from haikutrain.errors import UsageError


class Workdir:
    """Paths of a run's folder. Nothing is created before `claim`.

    Args:
      path: of the folder.

    Raises:
      UsageError: the path is a file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path).absolute()
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"workdir {path} is a file; name a folder with --workdir")
        self.config = self.path / "config.json"
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.metrics_eval = self.path / "metrics_eval.jsonl"
        self.tensorboard = self.path / "tensorboard"

    def check_owner(self, experiment: str) -> None:
        """Raises UsageError if another experiment's run is here."""
        try:
            owner = json.loads(self.config.read_text())["experiment"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        if owner != experiment:
            raise UsageError(
                f"workdir {self.path} holds a run of {owner}, and this is {experiment}; give "
                "another --workdir"
            )

    def check_writable(self) -> None:
        """Raises UsageError if the folder can be neither written nor created."""
        parent = next(p for p in (self.path, *self.path.parents) if p.exists())
        try:
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
