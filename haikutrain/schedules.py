"""Learning rates as functions of the step, and epochs as steps."""

import math

import jax.numpy as jnp
import optax

from haikutrain.errors import UsageError


def epochs(count: float, num_examples: int, batch_size: int) -> int:
    """The steps in which `count` epochs are consumed: `ceil(count * num_examples / batch_size)`."""
    return math.ceil(count * num_examples / batch_size)


def warmup_cosine(
    peak: float, num_steps: int, warmup_steps: int = 0, end: float = 0.0
) -> optax.Schedule:
    """Rises linearly from 0 to `peak`, then falls along half a cosine to `end`.

    With `w = warmup_steps` and `t = min((step - w) / (num_steps - w), 1)`:

        step < w:   peak * step / w
        otherwise:  end + (peak - end) * (1 + cos(pi * t)) / 2

    Returns:
      A function from `step` (an int or an int32 array) to the learning rate, float32.

    Raises:
      UsageError: unless `0 <= warmup_steps < num_steps`.
    """
    _check_warmup(warmup_steps, num_steps)
    fall = optax.cosine_decay_schedule(peak - end, num_steps - warmup_steps)
    return _warm_up(peak, warmup_steps, lambda step: end + fall(step))


def warmup_linear(
    peak: float, num_steps: int, warmup_steps: int = 0, end: float = 0.0
) -> optax.Schedule:
    """Rises linearly from 0 to `peak`, then falls linearly to `end`.

    With `w = warmup_steps` and `t = min((step - w) / (num_steps - w), 1)`:

        step < w:   peak * step / w
        otherwise:  peak + (end - peak) * t

    Returns and raises as `warmup_cosine` does.
    """
    _check_warmup(warmup_steps, num_steps)
    return _warm_up(peak, warmup_steps, optax.linear_schedule(peak, end, num_steps - warmup_steps))


def warmup_constant(peak: float, warmup_steps: int = 0) -> optax.Schedule:
    """Rises linearly from 0 to `peak`, then stays: `peak * min(step / warmup_steps, 1)`.

    Returns what `warmup_cosine` does; a negative `warmup_steps` is a UsageError.
    """
    if warmup_steps < 0:
        raise UsageError(f"warmup_steps={warmup_steps}: give 0 (no warm-up) or more")
    return _warm_up(peak, warmup_steps, optax.constant_schedule(peak))


def _check_warmup(warmup_steps: int, num_steps: int) -> None:
    if not 0 <= warmup_steps < num_steps:
        raise UsageError(
            f"warmup_steps={warmup_steps} with num_steps={num_steps}: the warm-up must be 0 or"
            " more steps and end before the run does"
        )


def _warm_up(peak: float, warmup_steps: int, after: optax.Schedule) -> optax.Schedule:
    if warmup_steps:
        rise = optax.linear_schedule(0.0, peak, warmup_steps)
        after = optax.join_schedules([rise, after], [warmup_steps])
    return lambda step: jnp.asarray(after(step), jnp.float32)
