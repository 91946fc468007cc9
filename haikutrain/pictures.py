"""Pictures as PNG, and several in one."""

import struct
import zlib

import numpy as np

from haikutrain.errors import UsageError


def encode(pixels: np.ndarray) -> bytes:
    """A picture as PNG.

    Args:
      pixels: `[H, W]`, `[H, W, 1]` or `[H, W, 3]`; uint8, or float in [0, 1] (clipped).

    Raises:
      UsageError: another shape.

    References:
      Portable Network Graphics, ISO/IEC 15948:2004.
    """
    pixels = np.asarray(pixels)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or pixels.shape[-1] not in (1, 3):
        raise UsageError(
            f"a picture has shape {list(pixels.shape)}; give [H, W], [H, W, 1] or [H, W, 3]"
        )
    if pixels.dtype != np.uint8:
        pixels = np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
    height, width, channels = pixels.shape
    grey_or_rgb = 0 if channels == 1 else 2
    header = struct.pack(">2I5B", width, height, 8, grey_or_rgb, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: no filter.
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


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
