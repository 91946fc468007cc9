"""Mixed precision through jmp: what a `precision` policy means inside a Haiku function.

For `"params=float32,compute=bfloat16,output=float32"`: parameters are created and kept in
`params`; each outermost module that the function calls computes in `compute` and returns `output`;
what stands between modules, the losses above all, is therefore in `output`. Modules that keep
statistics or normalise compute in float32 and return `compute`. Haiku's state is always float32.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import jmp

from haikutrain.errors import UsageError
from haikutrain.leaves import by_path

# By class, subclasses included. Their means and squares need more than the digits of bfloat16.
_FLOAT32_MODULES = (
    hk.BatchNorm,
    hk.ExponentialMovingAverage,
    hk.GroupNorm,
    hk.LayerNorm,
    hk.RMSNorm,
    hk.SpectralNorm,
    hk.nets.VectorQuantizer,
    hk.nets.VectorQuantizerEMA,
)


def policy(text: str | None) -> jmp.Policy | None:
    """The policy of a config's `precision`; None if everything stays float32.

    Raises:
      UsageError: the text is not a jmp policy.
    """
    if text is None:
        return None
    try:
        parsed = jmp.get_policy(text)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(
            f"config.precision={text!r} is no jmp policy ({error}); write for instance "
            "'params=float32,compute=bfloat16,output=float32'"
        ) from error
    plain = {parsed.param_dtype, parsed.compute_dtype, parsed.output_dtype} == {jnp.float32}
    return None if plain else parsed


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _cast_result(value: Any, dtype: Any) -> Any:
    return jmp.Policy(dtype, dtype, dtype).cast_to_output(value)


@contextlib.contextmanager
def applied(rule: jmp.Policy | None) -> Iterator[None]:
    """Runs Haiku code under a policy; to be entered inside the transformed function."""
    if rule is None:
        yield
        return
    with (
        hk.custom_creator(_creator(rule.param_dtype), params=True, state=False),
        hk.custom_creator(_creator(jnp.float32), params=False, state=True),
        hk.custom_getter(_getter(rule), params=True, state=False),
        hk.custom_setter(_set_float32),
        hk.intercept_methods(_interceptor(rule)),
    ):
        yield


def _creator(dtype: Any) -> Callable[..., Any]:
    """Haiku's modules ask for params in the dtype of their input: replace it."""

    def create(next_creator: Any, shape: Any, asked: Any, init: Any, context: Any) -> Any:
        del context
        return next_creator(shape, dtype if _is_float(asked) else asked, init)

    return create


def _getter(rule: jmp.Policy) -> Callable[..., Any]:
    def get(next_getter: Any, value: Any, context: Any) -> Any:
        value = next_getter(value)
        if context.module is None or not _is_float(value.dtype):
            return value
        exact = isinstance(context.module, _FLOAT32_MODULES)
        return value.astype(jnp.float32 if exact else rule.compute_dtype)

    return get


def _set_float32(next_setter: Any, value: Any, context: Any) -> Any:
    del context
    return next_setter(_cast_result(value, jnp.float32))


def _interceptor(rule: jmp.Policy) -> Callable[..., Any]:
    depth = 0

    def intercept(next_method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        nonlocal depth
        if context.method_name == "__init__":
            return next_method(*args, **kwargs)
        exact = isinstance(context.module, _FLOAT32_MODULES)
        if exact:
            args, kwargs = _cast_result((args, kwargs), jnp.float32)
        elif depth == 0:
            args, kwargs = rule.cast_to_compute((args, kwargs))
        depth += 1
        try:
            result = next_method(*args, **kwargs)
        finally:
            depth -= 1
        if depth == 0:
            return rule.cast_to_output(result)
        return rule.cast_to_compute(result) if exact else result

    return intercept


def initial_loss_scale(text: str | None) -> dict[str, jax.Array] | None:
    """What a dynamic loss scale begins with, where a policy computes in float16; else None."""
    rule = policy(text)
    if rule is None or rule.compute_dtype != jnp.float16:
        return None
    scale = jmp.DynamicLossScale(jnp.float32(2**15))
    return {"scale": jnp.float32(scale.loss_scale), "good_steps": jnp.int32(scale.counter)}


def adjusted_loss_scale(scale: dict[str, jax.Array], finite: jax.Array) -> dict[str, jax.Array]:
    """The loss scale after a step: halved by an overflow, doubled after 2000 steps without one.

    Args:
      scale: as `initial_loss_scale` makes it.
      finite: bool [], whether the gradients were finite.
    """
    new = jmp.DynamicLossScale(scale["scale"], scale["good_steps"]).adjust(finite)
    return {
        "scale": jnp.asarray(new.loss_scale, jnp.float32),
        "good_steps": jnp.asarray(new.counter, jnp.int32),
    }


def check_network_state(network_state: Any) -> None:
    """Raises UsageError naming the leaves of Haiku's state (arrays or shapes) that a policy moved.

    Moving averages in half precision stop moving: an update of 0.1 % is below their last digit.
    """
    wrong = [
        f"{path} is {leaf.dtype}"
        for path, leaf in by_path(network_state).items()
        if _is_float(leaf.dtype) and leaf.dtype != jnp.float32
    ]
    if wrong:
        raise UsageError(
            f"config.precision: network state must stay float32, but {', '.join(wrong)}; "
            "create it with hk.get_state inside loss, or as float32 in init"
        )
