"""The position of an input pipeline as JSON, and back with equal values and types."""

import base64
from typing import Any

import ml_dtypes
import numpy as np

from haikutrain.errors import UsageError

_PLAIN = (type(None), bool, int, float, str)
_TAG = "__type__"


def encode(position: Any) -> Any:
    """A position in JSON's own types: what `get_state()` of an iterator returns.

    None, bool, int, float, str, bytes, NumPy arrays and scalars, and list, tuple and dict of these
    come back from `decode` as they were, non-finite floats too. Anything else, subclasses of these
    types included, raises UsageError: what would come back is not what went in.
    """
    kind = type(position)
    if kind in _PLAIN:
        return position
    if kind is list:
        return [encode(value) for value in position]
    if kind is tuple:
        return {_TAG: "tuple", "items": [encode(value) for value in position]}
    if kind is bytes:
        return {_TAG: "bytes", "base64": base64.b64encode(position).decode("ascii")}
    if kind is dict:
        if all(type(key) is str and key != _TAG for key in position):
            return {key: encode(value) for key, value in position.items()}
        return {_TAG: "dict", "items": [[encode(k), encode(v)] for k, v in position.items()]}
    if (kind is np.ndarray or isinstance(position, np.generic)) and _has_name(position.dtype):
        return {
            _TAG: "array" if kind is np.ndarray else "scalar",
            "dtype": _dtype_name(position.dtype),
            "shape": list(position.shape),
            "base64": base64.b64encode(position.tobytes()).decode("ascii"),
        }
    what = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(position, np.ndarray | np.generic):
        what += f" of {position.dtype}"
    raise UsageError(
        f"the input's position holds a {what}, which a checkpoint cannot give back; let get_state()"
        " return numbers, strings, bytes, NumPy arrays, and lists, tuples or dicts of these"
    )


def decode(value: Any) -> Any:
    """The position that `encode` made `value` from."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    if kind == "tuple":
        return tuple(decode(item) for item in value["items"])
    if kind == "dict":
        return {decode(key): decode(item) for key, item in value["items"]}
    content = base64.b64decode(value["base64"])
    if kind == "bytes":
        return content
    name = value["dtype"]
    array = np.frombuffer(content, dtype=np.dtype(getattr(ml_dtypes, name, name)))
    array = array.reshape(value["shape"]).copy()
    return array if kind == "array" else array[()]


def _dtype_name(dtype: np.dtype) -> str:
    # The types of ml_dtypes (bfloat16) are "<V2" as a string, which has lost what they are.
    return dtype.name if hasattr(ml_dtypes, dtype.name) else dtype.str


def _has_name(dtype: np.dtype) -> bool:
    return dtype.kind in "biufcSUMm" or hasattr(ml_dtypes, dtype.name)
