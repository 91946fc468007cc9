"""A copy of the state for a save, which no donation can reach: cheap for the loop.

On CPU the loop's thread copies into host memory that is used again for each save: pages that were
touched before cost a memcpy, fresh ones several times that. On an accelerator the copy is made on
the device, in order with the steps around it, and goes to the host while training goes on.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haikutrain.leaves import is_key

_copy_on_device = jax.jit(functools.partial(jax.tree.map, jnp.copy))


class Staging:
    """Holds one copy of a state; the next `copy` overwrites it."""

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []

    def copy(self, tree: Any) -> Any:
        """The first replica of a replicated tree; valid until the next call.

        The caller has waited for the devices: on CPU the copy is done when this returns.
        """
        first = jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)
        if jax.default_backend() != "cpu":
            copied = _copy_on_device(first)
            for leaf in jax.tree.leaves(copied):
                leaf.copy_to_host_async()
            return copied
        leaves, treedef = jax.tree.flatten(first)
        arrays = [None if is_key(leaf) else np.asarray(leaf) for leaf in leaves]
        if [(a.shape, a.dtype) for a in arrays if a is not None] != [
            (b.shape, b.dtype) for b in self._buffers
        ]:
            self._buffers = [np.empty_like(a) for a in arrays if a is not None]
        buffers = iter(self._buffers)
        return jax.tree.unflatten(
            treedef,
            [
                _copy_on_device(leaf) if array is None else _filled(next(buffers), array)
                for leaf, array in zip(leaves, arrays, strict=True)
            ],
        )


def _filled(buffer: np.ndarray, array: np.ndarray) -> np.ndarray:
    np.copyto(buffer, array)
    return buffer
