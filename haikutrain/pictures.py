"""Pictures as PNG, and several in one. The one door to Pillow, which is an optional extra."""

import io

import numpy as np

from haikutrain.errors import UsageError


def encode(pixels: np.ndarray) -> bytes:
    """A picture as PNG.

    Args:
      pixels: `[H, W]`, `[H, W, 1]` or `[H, W, 3]`; uint8, or float in [0, 1] (clipped).

    Raises:
      UsageError: another shape; or Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError(
            "writing a picture needs Pillow: pip install 'haikutrain[images]'"
        ) from error
    pixels = np.asarray(pixels)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    if not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[-1] == 3)):
        raise UsageError(
            f"a picture has shape {list(pixels.shape)}; give [H, W], [H, W, 1] or [H, W, 3]"
        )
    if pixels.dtype != np.uint8:
        pixels = np.rint(pixels.clip(0, 1) * 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def grid(images: np.ndarray, columns: int) -> np.ndarray:
    """Several pictures in one: `[N, H, W, C]` to `[ceil(N / columns) * H, columns * W, C]`.

    Row by row, as one reads; what is left of the last row is zero.
    """
    count, height, width, channels = images.shape
    rows = -(-count // columns)
    cells = np.zeros((rows * columns, height, width, channels), images.dtype)
    cells[:count] = images
    cells = cells.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    return cells.reshape(rows * height, columns * width, channels)
