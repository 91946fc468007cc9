"""Positions of input pipelines through JSON."""

import collections
import json
import math

import ml_dtypes
import numpy as np
import pytest

from haikutrain.errors import UsageError
from haikutrain.positions import decode, encode


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize(
    "position",
    [
        None,
        True,
        2**80,
        -0.1,
        math.nan,
        -math.inf,
        "é\ud800",
        b"\x00\xff",
        [],
        (),
        {},
        (1, (2, [3, None]), {"a": (b"",)}),
        {1: "a", (2, 3): "b", None: {True: 1.5}},
        {"__type__": "tuple", "items": [1]},
        np.arange(6, dtype=np.uint64).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros((0, 2), np.float16),
        np.array(3),
        np.arange(3, dtype=">i4"),
        np.array(["ab", "c"]),
        np.array(["2024-01-02"], "M8[D]"),
        np.arange(3).astype(ml_dtypes.bfloat16),
        np.float32(0.1),
        np.bool_(True),
        np.int64(2**62),
        np.float64(0.5),
        {"state": {"rng": np.random.default_rng(0).bit_generator.state}},
    ],
    ids=repr,
)
def test_a_position_comes_back_with_its_types(position):
    back = decode(json.loads(json.dumps(encode(position))))
    assert same(back, position), back


def test_decoded_arrays_can_be_written_to():
    back = decode(encode(np.arange(3)))
    back[0] = 7
    assert back[0] == 7


@pytest.mark.parametrize(
    "position, what",
    [
        ({1, 2}, "builtins.set"),
        ([object()], "builtins.object"),
        (collections.OrderedDict(a=1), "OrderedDict"),
        (collections.namedtuple("Point", "x")(1), "Point"),
        (np.array([None]), "numpy.ndarray of object"),
        (np.zeros(1, [("a", "i4")]), "numpy.ndarray of "),
        (1j, "complex"),
    ],
)
def test_what_would_not_come_back_is_refused(position, what):
    with pytest.raises(UsageError, match=f"position holds a .*{what}"):
        encode({"deep": [position]})
