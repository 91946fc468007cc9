"""Exact means: over the rows of ragged batches, and over the steps of a log window."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haikutrain import nonfinite

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


def empty_window(names: Sequence[str]) -> np.ndarray:
    """float32 zeros for so many metrics and for the tally of `haikutrain.nonfinite`."""
    return np.zeros(len(names) + nonfinite.SIZE, np.float32)


def accumulate(
    window: jax.Array, values: Mapping[str, jax.Array], found: nonfinite.Found, *, skips: bool
) -> jax.Array:
    """Adds one step's metrics to a window, on the device.

    Args:
      window: float32 `[M + nonfinite.SIZE]`, the sums so far, in the order of `values`.
      values: M scalars.
      found: whether the step's loss and gradients are finite.
      skips: whether a step where they are not was skipped; its metrics are then left out.

    Returns:
      The window with this step in it; for a name in `LAST` the step's own value.
    """
    sums, tally = window[: len(values)], nonfinite.note(window[len(values) :], found)
    if not values:
        return tally
    new = jnp.stack([jnp.asarray(v).astype(jnp.float32) for v in values.values()])
    last = np.array([name in LAST for name in values])
    total = jnp.where(last, new, sums + new)
    if skips:
        total = jnp.where(found.bad, sums, total)
    return jnp.concatenate([total, tally])


class Window:
    """The open log window: sums of metrics over the steps since the last log line.

    `sums` is a device array float32 `[M + nonfinite.SIZE]` that the update reads and returns; this
    object only knows how many steps are in it, and what to make of those that are not finite.
    """

    def __init__(self, names: Sequence[str], zeros: jax.Array, judge: nonfinite.Judge):
        self.names = list(names)
        self.sums = zeros
        self.count = 0
        self._zeros = zeros
        self._judge = judge

    def close(self) -> tuple[jax.Array, int]:
        """Opens a new window; returns the closed one's sums, still on the device, and count."""
        closed = self.sums, self.count
        self.sums, self.count = self._zeros, 0
        return closed

    def wait(self, step: int) -> None:
        """Returns when the devices have done every step up to `step`, the window's last.

        Raises:
          NonFinite: a loss or gradient was not finite, and that ends the run.
        """
        sums = np.asarray(self.sums)
        if self.count:
            self._judge.check(sums[len(self.names) :], step - self.count)

    def means(self, sums: Any, count: int, step: int) -> dict[str, float]:
        """A closed window's metrics as Python floats; waits for the device.

        Args:
          sums: what `close` returned.
          count: likewise.
          step: the window's last.
        """
        values = np.asarray(sums).astype(np.float64)
        tally = nonfinite.Tally(*values[len(self.names) :].tolist())
        taken = (count - tally.bad if self._judge.skips else count) or math.nan
        means = {
            name: float(value if name in LAST else value / taken)
            for name, value in zip(self.names, values[: len(self.names)], strict=True)
        }
        if self._judge.skips:
            means["skipped"] = tally.bad
        return means

    def judge(self, sums: Any, count: int, step: int) -> None:
        """Judges a closed window. Raises as `wait` does."""
        self._judge.close(np.asarray(sums)[len(self.names) :], step - count)

    def to_json(self) -> dict[str, Any]:
        """The open window as plain data, for the checkpoint; waits for the device."""
        sums = np.asarray(self.sums).tolist()
        return {
            "names": self.names,
            "sums": sums,
            "count": self.count,
            "skipped_before": self._judge.carried,
        }
