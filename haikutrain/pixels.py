"""The arithmetic under augmentations: colours, resizing and blurring by matrices. All float32."""

import math

import jax
import jax.numpy as jnp
import numpy as np

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)

# Of red, green and blue, in ITU-R BT.601.
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


def luma(image: jax.Array) -> jax.Array:
    """`[..., 3]` -> `[..., 1]`; an image of one channel is its own luma."""
    return image if image.shape[-1] == 1 else (image * _LUMA).sum(axis=-1, keepdims=True)


def hue_turned(image: jax.Array, turns: jax.Array) -> jax.Array:
    """`[H, W, 3]` with HSV's hue turned by so many circles, its value and saturation kept."""
    red, green, blue = jnp.moveaxis(image, -1, 0)
    high = image.max(axis=-1)
    spread = high - image.min(axis=-1)
    divisor = jnp.where(spread > 0, spread, 1)
    sixths = jnp.where(
        high == red,
        (green - blue) / divisor,
        jnp.where(high == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    # Each channel falls by the spread over a third of the circle, at an angle of its own.
    angle = (np.array([5, 3, 1], np.float32) + sixths[..., None] + 6 * turns) % 6
    fall = jnp.clip(jnp.minimum(angle, 4 - angle), 0, 1)
    return high[..., None] - spread[..., None] * fall


def jittered(image: jax.Array, kind: jax.Array, amount: jax.Array, may_turn: bool) -> jax.Array:
    """One change of an image `[H, W, C]` in [0, 1].

    Args:
      image: of three channels, or of one without SATURATION and HUE.
      kind: an integer scalar: BRIGHTNESS, CONTRAST, SATURATION or HUE.
      amount: a scalar: circles of hue, or what is added to the factor 1 of the others.
      may_turn: False if `kind` is never HUE, which costs most.
    """
    gray, factor = luma(image), 1 + amount
    origin = jnp.where(kind == CONTRAST, gray.mean(), jnp.where(kind == SATURATION, gray, 0))
    changed = jnp.clip(factor * image + (1 - factor) * origin, 0, 1)
    return jnp.where(kind == HUE, hue_turned(image, amount), changed) if may_turn else changed


def weighted(images: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """New pixels `[B, S, T, C]` as weighted sums of old ones.

    Args:
      images: `[B, H, W, C]`, of any float dtype.
      rows: `[B, S, H]`, what each old row adds to each new one.
      columns: `[B, T, W]`, the same of columns.
    """
    # Products with matrices are what accelerators do best, but by default with too few digits.
    exact = jax.lax.Precision.HIGHEST
    half = jnp.einsum("bsh,bhwc->bswc", rows, images.astype(jnp.float32), precision=exact)
    return jnp.einsum("btw,bswc->bstc", columns, half, precision=exact)


def resize_weights(
    size: int, new_size: int, start: jax.Array, length: jax.Array, cubic: bool
) -> jax.Array:
    """Weights `[new_size, size]` that resize the pixels start to start + length - 1.

    The kernel, a triangle or Keys' cubic with a = -0.5, is widened where the window is made
    smaller. Each row sums to 1.
    """
    step = length / new_size
    centres = start + (jnp.arange(new_size) + 0.5) * step - 0.5
    places = jnp.arange(size)
    x = jnp.abs(places - centres[:, None]) / jnp.maximum(step, 1)
    if cubic:
        inner, outer = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
        kernel = jnp.where(x < 1, inner, jnp.where(x < 2, outer, 0))
    else:
        kernel = jnp.maximum(1 - x, 0)
    kernel = jnp.where((places >= start) & (places < start + length), kernel, 0)
    return kernel / kernel.sum(axis=1, keepdims=True)


def blur_weights(size: int, reach: int, sigma: jax.Array) -> jax.Array:
    """Weights `[size, size]` of a Gaussian cut off beyond `reach` pixels. Each row sums to 1."""
    distance = abs(np.subtract.outer(np.arange(size), np.arange(size)))
    kernel = jnp.where(distance <= reach, jnp.exp(-0.5 * (distance / sigma) ** 2), 0)
    return kernel / kernel.sum(axis=1, keepdims=True)


def window(
    key: jax.Array, size: tuple[int, ...], scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[jax.Array, jax.Array]:
    """A random window, by the rule of `augment.random_resized_crop`.

    Args:
      key: of one image.
      size: of the image, height and width.
      scale: bounds of the window's fraction of the area.
      ratio: bounds of its width / height.

    Returns:
      Its first row and column, int32 `[2]`, and its height and width, int32 `[2]`.
    """
    (height, width), (narrow, wide) = size, ratio
    area_key, ratio_key, place_key = jax.random.split(key, 3)
    areas = height * width * jax.random.uniform(area_key, (10,), jnp.float32, *scale)
    logs = jax.random.uniform(ratio_key, (10,), jnp.float32, math.log(narrow), math.log(wide))
    ratios = jnp.exp(logs)
    drawn = jnp.stack([jnp.sqrt(areas / ratios), jnp.sqrt(areas * ratios)], axis=1)
    drawn = jnp.round(drawn).astype(jnp.int32)
    fits = ((drawn > 0) & (drawn <= np.array(size))).all(axis=1)
    nearest = min(max(width / height, narrow), wide)
    largest = np.array(
        [
            max(1, min(height, round(width / nearest))),
            max(1, min(width, round(height * nearest))),
        ]
    )
    sides = jnp.where(fits.any(), drawn[fits.argmax()], largest)
    room = np.array(size) - sides
    placed = jax.random.randint(place_key, (2,), 0, room + 1)
    return jnp.where(fits.any(), placed, room // 2), sides
