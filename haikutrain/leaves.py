"""A tree as a flat table of leaves: their paths, shapes, checksums, digest and differences.

Every leaf has one name, its path: the keys from the root joined by `/`, as
`jax.tree_util.keystr(path, simple=True, separator="/")` writes it: `params/linear/w`, `step`.
Typed keys (`jax.random.key`) stand in tables as their uint32 data and their implementation's name.
"""

import contextlib
import dataclasses
import hashlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from haikutrain.errors import UsageError

_crc32 = zlib.crc32
# The same checksum, seven times as fast; it is not built for every machine.
with contextlib.suppress(ImportError):
    from isal.isal_zlib import crc32 as _crc32

Keys = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a leaf is, without its values: shape and dtype (of the key data, if it is a key)."""

    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None

    def __str__(self) -> str:
        kind = self.dtype if self.key_impl is None else f"key<{self.key_impl}>"
        shape = self.shape if self.key_impl is None else self.shape[:-1]
        return f"{kind}[{','.join(map(str, shape))}]"

    @property
    def size(self) -> int:
        """How many elements it has."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.size * numpy_dtype(self.dtype).itemsize


def numpy_dtype(name: str) -> np.dtype:
    """The dtype of a name such as `float32` or `bfloat16`; TypeError if there is none."""
    return np.dtype(getattr(ml_dtypes, name, name))


def flatten(tree: Any) -> dict[Keys, Any]:
    """The leaves of any pytree under their keys, outermost first.

    Raises UsageError if two leaves would have one path: a checkpoint could not tell them apart.
    """
    flat = {
        tuple(jax.tree_util.keystr((key,), simple=True, separator="/") for key in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    # Orbax names the leaves of an item by joining their keys with dots.
    for separator in "/.":
        seen: set[str] = set()
        for keys in flat:
            path = separator.join(keys)
            if path in seen:
                raise UsageError(
                    f"two leaves of the state are both called {path!r}; a checkpoint needs one"
                    " name for each: rename a module, parameter or key"
                )
            seen.add(path)
    return flat


def join(keys: Keys) -> str:
    """A leaf's path, from its keys."""
    return "/".join(keys)


def nest(flat: Mapping[Keys, Any]) -> Any:
    """The nested dicts that `flat` came from; the leaf itself for the one key `()`."""
    if () in flat:
        return flat[()]
    root: dict[str, Any] = {}
    for keys, leaf in flat.items():
        node = root
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = leaf
    return root


def is_key(leaf: Any) -> bool:
    """Whether a leaf, or the leaf that a ShapeDtypeStruct stands for, holds typed keys."""
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def describe(path: str, leaf: Any) -> Leaf:
    """What a leaf is: an array, a ShapeDtypeStruct, a Python number or typed keys of any shape.

    Raises UsageError, naming `path`, for anything that is not made of numbers or keys.
    """
    if is_key(leaf):
        names: list[str] = []

        def key_data(key: jax.Array) -> jax.Array:
            names.append(str(jax.random.key_impl(key)))
            return jax.random.key_data(key)

        # A ShapeDtypeStruct has no key_impl; a traced key has.
        data = jax.eval_shape(key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return Leaf(data.shape, data.dtype.name, names[0])
    if isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic):
        return Leaf((), jax.dtypes.result_type(leaf).name)
    dtype = getattr(leaf, "dtype", None)
    numbers = (np.bool_, np.number)
    if dtype is None or not any(jax.dtypes.issubdtype(dtype, kind) for kind in numbers):
        what = type(leaf).__name__ if dtype is None else f"{type(leaf).__name__} of {dtype}"
        raise UsageError(
            f"{path} is a {what}; a state is made of arrays of numbers and of keys: keep other"
            " values in the config or in the experiment's class"
        )
    return Leaf(tuple(leaf.shape), np.dtype(dtype).name)


def fetch(flat: Mapping[Keys, Any]) -> dict[Keys, np.ndarray]:
    """Brings leaves to the host: NumPy arrays in native byte order, keys as their data.

    On CPU these are views of the device's own memory: right for as long as nobody donates it.
    """
    described = {keys: describe(join(keys), leaf) for keys, leaf in flat.items()}
    plain = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in flat.values()]
    host = jax.device_get(plain)
    return {
        keys: np.asarray(value, dtype=numpy_dtype(described[keys].dtype))
        for keys, value in zip(flat, host, strict=True)
    }


def wrap(array: np.ndarray, leaf: Leaf) -> Any:
    """A leaf again from its values: typed keys (of the implementation named) from their data."""
    if leaf.key_impl is None:
        return array
    return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=leaf.key_impl)


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of any pytree by their paths."""
    return {join(keys): leaf for keys, leaf in flatten(tree).items()}


def leaf_table(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a pytree by path, as NumPy arrays; typed keys as key data."""
    return {join(keys): array for keys, array in fetch(flatten(tree)).items()}


def _bytes(array: np.ndarray) -> memoryview:
    # Types of ml_dtypes have no buffer protocol of their own.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def crc32(array: np.ndarray) -> int:
    """The CRC-32 of an array's bytes in C order."""
    return _crc32(_bytes(array))


def digest(tree: Any) -> str:
    """One sha256 over every leaf's path, dtype, shape and bytes: equal for equal states.

    Takes a state, any other pytree, or a table `{path: array}` of one. The leaves go in sorted by
    path, in C order, typed keys as key data, wherever they lay and whoever wrote them.
    """
    total = hashlib.sha256()
    for path, array in sorted(leaf_table(tree).items()):
        shape = ",".join(map(str, array.shape))
        total.update(f"{path}\0{array.dtype.name}\0{shape}\0".encode())
        total.update(_bytes(array))
    return total.hexdigest()


def take(tree: Any, saved: Mapping[str, Any], prefixes: Mapping[str, str]) -> Any:
    """A tree with some leaves replaced by those of a checkpoint, also under other names.

    For `Experiment.warm_start`:

        params = haikutrain.take(state.params, saved, {"encoder": "params/byol/encoder"})

    Args:
      tree: nested dicts, such as `state.params`.
      saved: arrays by path.
      prefixes: for the beginning of a path in `tree`, the beginning of the path in `saved` that it
        is to be taken from. Whole names only: "encoder" is not the beginning of "encoder_2/w".

    Raises:
      UsageError: a prefix matches nothing, or a leaf is missing in `saved` or has another shape or
        dtype; names all of them.
    """
    wrong, used = [], set()

    def one(path: str, leaf: Any) -> Any:
        for new, old in prefixes.items():
            if path == new or path.startswith(f"{new}/"):
                used.add(new)
                source = old + path[len(new) :]
                wanted = describe(path, leaf)
                if source not in saved:
                    wrong.append(f"{path}: the checkpoint has no {source}")
                elif (found := describe(source, saved[source])) != wanted:
                    wrong.append(f"{path} is {wanted} and {source} in the checkpoint {found}")
                return saved.get(source)
        return leaf

    values = [one(path, leaf) for path, leaf in by_path(tree).items()]
    wrong += [f"nothing is called {new}" for new in prefixes if new not in used]
    if wrong:
        raise UsageError(f"take: {'; '.join(wrong)}")
    return jax.tree.unflatten(jax.tree.structure(tree), values)


def differences(saved: Mapping[str, Leaf], wanted: Mapping[str, Leaf]) -> list[str]:
    """Each way in which the leaves of a checkpoint are not those of an experiment, by path."""
    found = []
    for path in _in_order(wanted, saved):
        if path not in saved:
            found.append(f"{path} ({wanted[path]} in the experiment) is not in the checkpoint")
        elif path not in wanted:
            found.append(f"{path} ({saved[path]} in the checkpoint) is not in the experiment")
        elif saved[path] != wanted[path]:
            found.append(
                f"{path} is {saved[path]} in the checkpoint and {wanted[path]} in the experiment"
            )
    return found


def _in_order(*tables: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(path for table in tables for path in table))
