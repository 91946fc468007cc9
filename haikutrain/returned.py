"""What the functions of an experiment must return; each mistake a UsageError that names it."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from haikutrain import leaves
from haikutrain.errors import UsageError
from haikutrain.train_state import TrainState


def check_scalars(values: Any, owner: str) -> None:
    """The metrics of an update: scalars by name."""
    if not isinstance(values, Mapping):
        raise UsageError(f"{owner}.update must return (state, metrics) with a dict of metrics")
    for name, value in values.items():
        if jnp.shape(value) != ():
            raise UsageError(
                f"{owner}.update: metric {name!r} has shape {list(jnp.shape(value))}; return "
                "scalars, already averaged over the devices (haikutrain.pmean)"
            )


def check_rows(
    means: Mapping[str, Any], kept: Mapping[str, Any], rows: tuple[int, ...], owner: str
) -> None:
    """The metrics of an evaluation: one value a row, or the batch's mean; kept values by row."""
    for name, value in means.items():
        if value.shape not in ((), rows):
            raise UsageError(
                f"{owner}.evaluate: metric {name!r} has shape {list(value.shape)}; give one value "
                f"an example, {list(rows)}, the batch's mean, [], or haikutrain.Rows"
            )
    for name, value in kept.items():
        if value.shape[:1] != rows:
            raise UsageError(
                f"{owner}.evaluate: Rows {name!r} has shape {list(value.shape)}; its first axis "
                f"must be the batch's {rows[0]} rows"
            )


def check_unchanged(old: TrainState, new: TrainState, owner: str) -> None:
    """The state of an update: of the structure, shapes and dtypes that it was given."""
    before, after = (
        {path: str(leaves.describe(path, leaf)) for path, leaf in leaves.by_path(state).items()}
        for state in (old, new)
    )
    changes = [
        f"{path} was {before.get(path, 'absent')} and is {after.get(path, 'absent')}"
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path)
    ]
    types: list[Any] = [jax.tree.structure(state) for state in (old, new)]
    if changes or types[0] != types[1]:
        what = "; ".join(changes) or "its tree has other types"
        raise UsageError(
            f"{owner}.update must return a state of the structure, shapes and dtypes that it was "
            f"given: {what}"
        )
