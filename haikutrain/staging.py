"""A copy of the state for a save, which no donation can reach: cheap for the loop.

On CPU the loop's thread copies into host memory that is used again for each save: pages that were
touched before cost a memcpy, fresh ones several times that. On an accelerator the copy is made on
the device, in order with the steps around it, and goes to the host while training goes on.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from haikutrain import devices
from haikutrain.leaves import is_key
from haikutrain.shared_memory import Spec


class Staging:
    """Holds one copy of a state; the next `copy` overwrites it.

    Args:
      allocate: makes host arrays of these shapes and dtypes.
    """

    def __init__(self, allocate: Callable[[Sequence[Spec]], list[np.ndarray]]):
        self._allocate = allocate
        self._buffers: list[np.ndarray] = []

    def copy(self, tree: Any) -> Any:
        """The first replica of a replicated tree; valid until the next call.

        The caller has waited for the devices: on CPU the copy is done when this returns.
        """
        if jax.default_backend() != "cpu":
            copied = devices.snapshot(tree)
            for leaf in jax.tree.leaves(copied):
                leaf.copy_to_host_async()
            return copied
        leaves, treedef = jax.tree.flatten(tree)
        arrays = [None if is_key(x) else np.asarray(x.addressable_data(0)) for x in leaves]
        specs = [(a.shape, a.dtype) for a in arrays if a is not None]
        if specs != [(b.shape, b.dtype) for b in self._buffers]:
            self._buffers = self._allocate(specs)
        buffers = iter(self._buffers)
        return jax.tree.unflatten(
            treedef,
            [
                devices.snapshot(leaf) if array is None else _filled(next(buffers), array)
                for leaf, array in zip(leaves, arrays, strict=True)
            ],
        )


def _filled(buffer: np.ndarray, array: np.ndarray) -> np.ndarray:
    np.copyto(buffer, array)
    return buffer
