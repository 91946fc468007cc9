"""Exact means: over the rows of ragged batches, and over the steps of a log window."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LAST = ("learning_rate", "loss_scale")
"""Training metrics of which a window keeps the last step's value instead of the mean."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Values that evaluation keeps row by row instead of averaging them.

    Return `{"prediction": haikutrain.Rows(logits.argmax(-1))}` among the metrics of `loss` or
    `evaluate`: the whole split's rows, each example once and in order, go to
    `Experiment.report` and to `--predictions`. In training they are left out, and cost nothing.
    """

    values: Any
    """`[B, ...]`, any dtype."""


def masked_sums(values: Mapping[str, jax.Array], mask: jax.Array) -> dict[str, jax.Array]:
    """Sums over the real rows of a batch.

    Args:
      values: for each metric `[B]`, one value a row, or `[]`, the mean of the batch's rows.
      mask: bool `[B]`, False for padding rows; what stands there is ignored, NaN included.

    Returns:
      For each metric its float32 sum, `[]`.
    """
    count = mask.sum(dtype=jnp.float32)

    def total(value: jax.Array) -> jax.Array:
        value = jnp.asarray(value).astype(jnp.float32)
        return jnp.where(mask, value, 0.0).sum() if value.ndim else value * count

    return {name: total(value) for name, value in values.items()}


class Mean:
    """The mean over all rows of a split, from each batch's sums; accumulated in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self.count = 0.0
        """How many rows."""

    def add(self, sums: Mapping[str, Any], count: float) -> None:
        """Adds one batch: sums over its `count` real rows."""
        self.count += float(count)
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def result(self) -> dict[str, float]:
        """The means; NaN where there was no row."""
        count = self.count or math.nan
        return {name: value / count for name, value in self._sums.items()}


def accumulate(window: jax.Array, values: Mapping[str, jax.Array]) -> jax.Array:
    """Adds one step's metrics to a window, on the device.

    Args:
      window: float32 `[M]`, the sums so far, in the order of `values`.
      values: M scalars.

    Returns:
      float32 `[M]`; for a name in `LAST` the step's own value.
    """
    if not values:
        return window
    new = jnp.stack([jnp.asarray(v).astype(jnp.float32) for v in values.values()])
    last = np.array([name in LAST for name in values])
    return jnp.where(last, new, window + new)


class Window:
    """The open log window: sums of metrics over the steps since the last log line.

    `sums` is a device array float32 `[M]` that the update reads and returns; this object only
    knows how many steps are in it and when it was opened.
    """

    def __init__(self, names: Sequence[str], zeros: jax.Array):
        self.names = list(names)
        self.sums = zeros
        self.count = 0
        self._zeros = zeros

    def close(self) -> tuple[jax.Array, int]:
        """Opens a new window; returns the closed one's sums, still on the device, and count."""
        closed = self.sums, self.count
        self.sums, self.count = self._zeros, 0
        return closed

    def wait(self) -> None:
        """Returns when the devices have done every step that is in the window."""
        self.sums.block_until_ready()

    def means(self, sums: Any, count: int) -> dict[str, float]:
        """A closed window's metrics as Python floats; waits for the device."""
        values = np.asarray(sums).astype(np.float64)
        return {
            name: float(value if name in LAST else value / count)
            for name, value in zip(self.names, values, strict=True)
        }

    def to_json(self) -> dict[str, Any]:
        """The open window as plain data, for the checkpoint; waits for the device."""
        sums = np.asarray(self.sums).tolist()
        return {"names": self.names, "sums": sums, "count": self.count}
