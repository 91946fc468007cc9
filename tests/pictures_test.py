"""Pictures as another program reads them."""

import io

import numpy as np
import pytest
from PIL import Image

from haikutrain import pictures
from haikutrain.errors import UsageError


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 1), (5, 3, 3), (1, 1), (64, 200, 3)])
def test_pillow_reads_the_same_pixels(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    read = np.asarray(Image.open(io.BytesIO(pictures.encode(pixels))))
    np.testing.assert_array_equal(read, pixels.reshape(read.shape))


def test_floats_are_scaled_rounded_and_clipped():
    encoded = pictures.encode(np.array([[-1.0, 0.0, 0.5, 1.0, 7.0]]))
    assert np.asarray(Image.open(io.BytesIO(encoded))).tolist() == [[0, 0, 128, 255, 255]]


@pytest.mark.parametrize("shape", [(3,), (4, 4, 2), (2, 4, 4, 3)])
def test_other_shapes_are_refused_by_name(shape):
    with pytest.raises(UsageError, match=r"a picture has shape \[.*\[H, W, 3\]"):
        pictures.encode(np.zeros(shape))


def test_a_grid_reads_row_by_row_and_ends_in_zeros():
    cells = np.arange(1, 4)[:, None, None, None] * np.ones((3, 2, 2, 1), np.int32)
    assert pictures.grid(cells, 2)[..., 0].tolist() == [
        [1, 1, 2, 2],
        [1, 1, 2, 2],
        [3, 3, 0, 0],
        [3, 3, 0, 0],
    ]
