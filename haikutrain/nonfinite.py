"""Steps whose loss or gradient is not finite: noted on the device, judged on the host.

Each update adds one `Found` to a few numbers that travel with the window of the log, so that
nothing is fetched for it. The host looks at them when a window is delivered, and before whatever
must not happen after such a step: a save, an evaluation.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from haikutrain.errors import NonFinite

LEAVES, FIRST = "nonfinite_leaves", "nonfinite_first"
"""Under these names `apply_gradients` hands on how many leaves' gradients are not finite, and the
number of the first one in the order of `jax.tree.leaves(params)`. They are no metrics."""

JUDGED = ("loss", "grad_norm")
"""The metrics that must be finite."""


class Found(NamedTuple):
    """What one step's update came to; equal on all devices."""

    bad: jax.Array
    """bool []: whether the loss or a gradient is not finite."""
    loss: jax.Array
    """bool []: whether the loss is not."""
    first: jax.Array
    """int32 []: the first leaf whose gradient is not finite, if there is one."""
    leaves: jax.Array
    """int32 []: how many leaves' gradients are not finite."""


class Tally(NamedTuple):
    """What the steps of a window came to: on the device a float32 vector, in this order."""

    steps: Any
    bad: Any
    """How many steps were bad."""
    lead: Any
    """With how many bad steps it begins."""
    trail: Any
    """With how many it ends."""
    longest: Any
    """The most in a row."""
    at: Any
    """Which of the steps was the first bad one, counted from 1."""
    loss: Any
    """Whether its loss was not finite."""
    first: Any
    leaves: Any
    """Of that step, as in `Found`."""


SIZE = len(Tally._fields)


def find(metrics: Mapping[str, Any]) -> Found:
    """Judges one step by what its update returned, averaged over the devices.

    Args:
      metrics: the update's, and those of `apply_gradients` named above.
    """
    zero = jnp.int32(0)
    leaves, first = metrics.get(LEAVES, zero), metrics.get(FIRST, zero)
    loss = ~jnp.isfinite(jnp.asarray(metrics.get("loss", 0.0)))
    norm = ~jnp.isfinite(jnp.asarray(metrics.get("grad_norm", 0.0)))
    return Found(loss | norm | (leaves > 0), loss, first, leaves)


def note(tally: jax.Array, found: Found) -> jax.Array:
    """Adds one step to a window's tally, float32 [SIZE], on the device."""
    old = Tally(*tally)
    bad = found.bad.astype(jnp.float32)
    trail = (old.trail + 1) * bad
    begins = (old.bad == 0) & found.bad
    new = Tally(
        steps=old.steps + 1,
        bad=old.bad + bad,
        lead=old.lead + bad * (old.lead == old.steps),
        trail=trail,
        longest=jnp.maximum(old.longest, trail),
        at=jnp.where(begins, old.steps + 1, old.at),
        loss=jnp.where(begins, found.loss, old.loss),
        first=jnp.where(begins, found.first, old.first),
        leaves=jnp.where(begins, found.leaves, old.leaves),
    )
    return jnp.stack([jnp.asarray(value, jnp.float32) for value in new])


class Judge:
    """Says what to do about such steps.

    Attributes:
      skips: whether they are left out.
      carried: the bad steps in a row just before the open window.

    Args:
      mode: "stop", or "skip" where the update leaves them out.
      max_skipped: so many in a row end the run.
      names: of the leaves of params.
      carried: the bad steps in a row just before the first window.
    """

    def __init__(self, mode: str, max_skipped: int, names: Sequence[str], carried: int = 0):
        self.carried = carried
        self.skips = mode == "skip"
        self._max_skipped = max_skipped
        self._names = names

    def check(self, tally: np.ndarray, begin: int) -> None:
        """Judges a window that began after step `begin`; raises NonFinite."""
        seen = Tally(*np.asarray(tally).tolist())
        if not seen.bad:
            return
        step = begin + int(seen.at)
        if not self.skips:
            raise NonFinite(
                f"step {step}: {self._what(seen)} not finite; nothing of it was saved. Lower the "
                "learning rate, clip the gradients (config.grad_clip_norm), or leave such steps "
                "out (config.on_nonfinite='skip')"
            )
        if max(seen.longest, self._joined(seen)) >= self._max_skipped:
            raise NonFinite(
                f"{self._max_skipped} steps in a row were skipped (config.max_skipped), the first "
                f"of them or of those before it at step {step}: there {self._what(seen)} not finite"
            )

    def close(self, tally: np.ndarray, begin: int) -> int:
        """Judges a window that has ended; returns how many of its steps were skipped."""
        self.check(tally, begin)
        seen = Tally(*np.asarray(tally).tolist())
        whole = seen.trail == seen.steps
        self.carried = int(seen.trail) + (self.carried if whole else 0)
        if seen.bad:
            logging.warning(
                "skipped %d of %d steps, the first at step %d: %s not finite",
                seen.bad,
                seen.steps,
                begin + int(seen.at),
                self._what(seen),
            )
        return int(seen.bad)

    def _joined(self, seen: Tally) -> float:
        """How many bad steps in a row end or begin at the window's beginning."""
        return self.carried + seen.lead

    def _what(self, seen: Tally) -> str:
        parts = ["the loss"] if seen.loss else []
        if seen.leaves:
            more = f" and {int(seen.leaves) - 1} more leaves" if seen.leaves > 1 else ""
            parts.append(f"the gradient of params/{self._names[int(seen.first)]}{more}")
        if not parts:
            parts = ["the gradient's norm"]
        return f"{' and '.join(parts)} {'are' if len(parts) > 1 else 'is'}"
