"""Augmentations: functions of a key and images, to be used on the device, inside a loss or update.

```python
def loss(self, batch, is_training):
    x = batch["image"]
    if is_training:
        x = haikutrain.augment.random_crop(hk.next_rng_key(), x)
        x = haikutrain.augment.random_flip(hk.next_rng_key(), x)
```

`key` is one key, raw or typed; `images` are `[B, H, W, C]`, and so are those returned, of the same
dtype. Crop, flip and cutout take any dtype; the others floats in [0, 1], so normalise after them,
and compute in float32. All other arguments are Python numbers.

Each row has numbers of its own: "Draws" says how row i gets them from its key,
`k = jax.random.split(key, B)[i]`, by functions of `jax.random`. Since the framework gives each
device another key, they are others on another number of devices.

All raise `UsageError` for a wrong rank, dtype, number of channels or range.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haikutrain import pixels
from haikutrain.errors import UsageError


def random_crop(key: jax.Array, images: jax.Array, padding: int = 4) -> jax.Array:
    """A window of the old size, anywhere in the image padded with zeros.

    Draws: `top, left = randint(k, (2,), 0, 2 * padding + 1)`.

    Args:
      images: `[B, H, W, C]`, any dtype.
      padding: rows or columns of zeros on each side, >= 0; 4 for 32x32 pixels.

    References:
      He et al., https://arxiv.org/abs/1512.03385, section 4.2.
    """
    keys, images = _rows("random_crop", key, images)
    _in_range("random_crop: padding", padding, 0, whole=True)
    sides = (padding, padding)
    padded = jnp.pad(images, ((0, 0), sides, sides, (0, 0)))

    def crop(key: jax.Array, image: jax.Array) -> jax.Array:
        top, left = jax.random.randint(key, (2,), 0, 2 * padding + 1)
        return jax.lax.dynamic_slice(image, (top, left, 0), images.shape[1:])

    return jax.vmap(crop)(keys, padded)


def random_flip(key: jax.Array, images: jax.Array, *, probability: float = 0.5) -> jax.Array:
    """Mirrors left and right, where `bernoulli(k, probability)`.

    Args:
      images: `[B, H, W, C]`, any dtype.
      probability: in [0, 1].
    """
    keys, images = _rows("random_flip", key, images)
    return _sometimes("random_flip", keys, probability, images[:, :, ::-1], images)


def random_resized_crop(
    key: jax.Array,
    images: jax.Array,
    size: int | tuple[int, int],
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    cubic: bool = False,
) -> jax.Array:
    """A window of random area and shape, resized: the Inception crop, as torchvision has it.

    Only pixels of the window count, and the kernel is widened where they are more than the new
    ones (antialiasing), as in cropping and resizing with Pillow.

    Draws: `a, r, p = split(k, 3)`; ten fractions of the area, `uniform(a, (10,), float32, *scale)`,
    and ten shapes, `exp(uniform(r, (10,), float32, log(ratio[0]), log(ratio[1])))`. The sides are
    rounded, and the first pair that fits the image is placed at
    `randint(p, (2,), 0, [H - height + 1, W - width + 1])`. If none does: the largest window with a
    ratio within the bounds, in the middle.

    Args:
      images: `[B, H, W, C]`, float in [0, 1].
      size: `(S, T)` of the result `[B, S, T, C]`, or one number for both.
      scale: bounds of the fraction of the area, in (0, 1].
      ratio: bounds of width / height, > 0.
      cubic: Keys' cubic kernel, clipped to [0, 1], as BYOL has it, instead of a linear one.

    References:
      Szegedy et al., https://arxiv.org/abs/1409.4842, section 6.
    """
    name = "random_resized_crop"
    keys, images = _rows(name, key, images, floats=True)
    new_size = size if isinstance(size, tuple) else (size, size)
    if len(new_size) != 2:
        raise UsageError(f"augment.{name}: size is {size!r}; it must be a number or (S, T)")
    for side in new_size:
        _in_range(f"{name}: size", side, 1, whole=True)
    _in_order(f"{name}: scale", scale, 1)
    _in_order(f"{name}: ratio", ratio)

    def weights(key: jax.Array) -> list[jax.Array]:
        starts, sides = pixels.window(key, images.shape[1:3], scale, ratio)
        axes = zip(images.shape[1:3], new_size, starts, sides, strict=True)
        return [pixels.resize_weights(*axis, cubic) for axis in axes]

    resized = pixels.weighted(images, *jax.vmap(weights)(keys))
    return (jnp.clip(resized, 0, 1) if cubic else resized).astype(images.dtype)


def cutout(key: jax.Array, images: jax.Array, size: int, *, fill: Any = 0.0) -> jax.Array:
    """Covers a square whose centre is anywhere in the image, so that it may stick out.

    Draws: `y, x = randint(k, (2,), 0, [H, W])`. Covered are `size` rows from `y - size // 2` and
    `size` columns from `x - size // 2`.

    Args:
      images: `[B, H, W, C]`, any dtype.
      size: the square's side, >= 0; 16 for CIFAR-10, 8 for CIFAR-100.
      fill: the new value, a number or `[C]`; zero once the data's mean is subtracted.

    References:
      DeVries and Taylor, https://arxiv.org/abs/1708.04552.
    """
    keys, images = _rows("cutout", key, images)
    _in_range("cutout: size", size, 0, whole=True)
    height, width, channels = images.shape[1:]
    if np.shape(fill) not in ((), (channels,)):
        raise UsageError(
            f"augment.cutout: fill has shape {np.shape(fill)}, not () or ({channels},)"
        )

    def covered(key: jax.Array) -> jax.Array:
        top, left = jax.random.randint(key, (2,), 0, np.array([height, width])) - size // 2
        rows, columns = jnp.arange(height) - top, jnp.arange(width) - left
        return ((rows >= 0) & (rows < size))[:, None] & (columns >= 0) & (columns < size)

    cover = jax.vmap(covered)(keys)[..., None]
    return jnp.where(cover, jnp.asarray(fill, images.dtype), images)


def mixup(
    key: jax.Array, images: jax.Array, labels: jax.Array, alpha: float
) -> tuple[jax.Array, jax.Array]:
    """Mixes each example with another one of the device, and their labels by the same weight.

    In images and labels, `x[i]` becomes `w[i] * x[i] + (1 - w[i]) * x[p[i]]`, where
    `a, b = split(key)`, `w = beta(a, alpha, alpha, (B,))` and `p = permutation(b, B)`.

    Args:
      images: `[B, H, W, C]`, float.
      labels: `[B, K]`, float, such as `jax.nn.one_hot(label, K)`; the mixed ones are for
        `optax.softmax_cross_entropy`.
      alpha: > 0; the smaller, the less is mixed. 1 for CIFAR-10, 0.2 for ImageNet.

    References:
      Zhang et al., https://arxiv.org/abs/1710.09412.
    """
    keys, images = _rows("mixup", key, images, floats=True)
    count, labels = len(keys), jnp.asarray(labels)
    if labels.ndim != 2 or len(labels) != count or not jnp.issubdtype(labels.dtype, jnp.floating):
        raise UsageError(
            f"augment.mixup: labels are {labels.dtype}{list(labels.shape)}; they must be float "
            f"[{count}, K], such as jax.nn.one_hot(label, K)"
        )
    if not _is_number(alpha) or not 0 < alpha < math.inf:
        raise UsageError(f"augment.mixup: alpha is {alpha!r}; it must be a number > 0")
    weights_key, partners_key = jax.random.split(key)
    weights = jax.random.beta(weights_key, alpha, alpha, (count,), jnp.float32)
    partners = jax.random.permutation(partners_key, count)

    def mixed(x: jax.Array) -> jax.Array:
        own = weights.reshape(count, *[1] * (x.ndim - 1))
        exact = x.astype(jnp.float32)
        return (own * exact + (1 - own) * exact[partners]).astype(x.dtype)

    return mixed(images), mixed(labels)


def color_jitter(
    key: jax.Array,
    images: jax.Array,
    brightness: float = 0.0,
    contrast: float = 0.0,
    saturation: float = 0.0,
    hue: float = 0.0,
    *,
    probability: float = 1.0,
) -> jax.Array:
    """Changes brightness, contrast, saturation and hue, in random order, as torchvision does.

    With f = 1 + strength * u, brightness makes x to f x, contrast to f x + (1 - f) (the image's
    mean luma), saturation to f x + (1 - f) luma, each clipped to [0, 1]; hue turns that of HSV by
    strength * u circles. A change of strength 0 is left out.

    Draws: `c, o, v = split(k, 3)`; nothing is changed but where `bernoulli(c, probability)`; the
    order is `permutation(o, n)`, n being the numbers (0 to 3) of the changes of strength > 0, and
    their u are `uniform(v, (4,), float32, -1, 1)`.

    Args:
      images: `[B, H, W, 3]`, float in [0, 1]; one channel without saturation and hue.
      brightness: strength in [0, 1]; BYOL's is 0.4.
      contrast: strength in [0, 1]; BYOL's is 0.4.
      saturation: strength in [0, 1]; BYOL's is 0.2.
      hue: strength in [0, 0.5]; BYOL's is 0.1.
      probability: in [0, 1]; BYOL's is 0.8.

    References:
      Chen et al. (SimCLR), https://arxiv.org/abs/2002.05709, appendix A.
      Grill et al. (BYOL), https://arxiv.org/abs/2006.07733, appendix B.
    """
    _in_range("color_jitter: brightness", brightness, 0, 1)
    _in_range("color_jitter: contrast", contrast, 0, 1)
    _in_range("color_jitter: saturation", saturation, 0, 1)
    _in_range("color_jitter: hue", hue, 0, 0.5)
    channels = (3,) if saturation or hue else (1, 3)
    keys, images = _rows("color_jitter", key, images, floats=True, channels=channels)
    strengths = np.array([brightness, contrast, saturation, hue], np.float32)
    kinds = strengths.nonzero()[0]

    def jitter(key: jax.Array, image: jax.Array) -> tuple[jax.Array, jax.Array]:
        chosen_key, order_key, amounts_key = jax.random.split(key, 3)
        amounts = strengths * jax.random.uniform(amounts_key, (4,), jnp.float32, -1, 1)
        for kind in jax.random.permutation(order_key, kinds) if kinds.size else ():
            image = pixels.jittered(image, kind, amounts[kind], may_turn=hue > 0)
        return chosen_key, image

    chosen_keys, changed = jax.vmap(jitter)(keys, images.astype(jnp.float32))
    return _sometimes("color_jitter", chosen_keys, probability, changed, images)


def random_grayscale(key: jax.Array, images: jax.Array, *, probability: float = 0.2) -> jax.Array:
    """Makes all channels 0.299 red + 0.587 green + 0.114 blue, where `bernoulli(k, probability)`.

    Args:
      images: `[B, H, W, 3]`, float.
      probability: in [0, 1]; BYOL's is 0.2.
    """
    keys, images = _rows("random_grayscale", key, images, floats=True, channels=(3,))
    gray = jnp.broadcast_to(pixels.luma(images.astype(jnp.float32)), images.shape)
    return _sometimes("random_grayscale", keys, probability, gray, images)


def gaussian_blur(
    key: jax.Array,
    images: jax.Array,
    kernel_size: int,
    sigma: tuple[float, float] = (0.1, 2.0),
    *,
    probability: float = 1.0,
) -> jax.Array:
    """Blurs by a Gaussian of random width, cut off at the borders and scaled to sum 1 there too.

    Draws: `c, s = split(k)`; blurred where `bernoulli(c, probability)`, by a standard deviation of
    `uniform(s, (), float32, *sigma)` pixels.

    Args:
      images: `[B, H, W, C]`, float.
      kernel_size: odd; BYOL's is 23, for 224x224 pixels.
      sigma: bounds of the standard deviation, > 0.
      probability: in [0, 1]; BYOL's is 1 for one view and 0.1 for the other.

    References:
      Chen et al. (SimCLR), https://arxiv.org/abs/2002.05709, appendix A.
    """
    name = "gaussian_blur"
    keys, images = _rows(name, key, images, floats=True)
    _in_range(f"{name}: kernel_size", kernel_size, 1, whole=True)
    _in_order(f"{name}: sigma", sigma)
    if kernel_size % 2 == 0:
        raise UsageError(f"augment.{name}: kernel_size is {kernel_size}; it must be odd")

    def weights(key: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        chosen_key, sigma_key = jax.random.split(key)
        width = jax.random.uniform(sigma_key, (), jnp.float32, *sigma)
        reach = kernel_size // 2
        return chosen_key, [pixels.blur_weights(n, reach, width) for n in images.shape[1:3]]

    chosen_keys, kernels = jax.vmap(weights)(keys)
    return _sometimes(name, chosen_keys, probability, pixels.weighted(images, *kernels), images)


def solarize(
    key: jax.Array, images: jax.Array, threshold: float = 0.5, *, probability: float = 1.0
) -> jax.Array:
    """Makes x to 1 - x if x >= threshold, where `bernoulli(k, probability)`.

    Args:
      images: `[B, H, W, C]`, float in [0, 1].
      threshold: in [0, 1].
      probability: in [0, 1]; BYOL's is 0 for one view and 0.2 for the other.
    """
    keys, images = _rows("solarize", key, images, floats=True)
    _in_range("solarize: threshold", threshold, 0, 1)
    inverted = jnp.where(images >= threshold, 1 - images, images)
    return _sometimes("solarize", keys, probability, inverted, images)


def _sometimes(
    name: str, keys: jax.Array, probability: float, changed: jax.Array, images: jax.Array
) -> jax.Array:
    _in_range(f"{name}: probability", probability, 0, 1)
    chosen = jax.vmap(lambda key: jax.random.bernoulli(key, probability))(keys)
    return jnp.where(chosen[:, None, None, None], changed.astype(images.dtype), images)


def _rows(
    name: str, key: Any, images: Any, *, floats: bool = False, channels: tuple[int, ...] = ()
) -> tuple[jax.Array, jax.Array]:
    """A key for each row, and the images; checked."""
    if not isinstance(key, jax.Array | np.ndarray):
        raise UsageError(f"augment.{name}: key is a {type(key).__name__}; give hk.next_rng_key()")
    if key.ndim != (0 if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else 1):
        raise UsageError(f"augment.{name}: key has shape {key.shape}; give one, not one a row")
    images = jnp.asarray(images)
    found = f"augment.{name}: images are {images.dtype}{list(images.shape)}"
    if images.ndim != 4:
        raise UsageError(f"{found}; they must be [B, H, W, C]")
    if channels and images.shape[3] not in channels:
        raise UsageError(f"{found}; they must have {' or '.join(map(str, channels))} channels")
    if floats and not jnp.issubdtype(images.dtype, jnp.floating):
        raise UsageError(f"{found}; they must be floats: images / 255")
    return jax.random.split(key, len(images)), images


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _in_range(
    what: str, value: Any, low: float, high: float = math.inf, *, whole: bool = False
) -> None:
    kind_fits = isinstance(value, int | np.integer) or not whole
    if not (_is_number(value) and kind_fits and low <= value <= high):
        noun = "an integer" if whole else "a number"
        rule = f">= {low}" if high == math.inf else f"in [{low}, {high}]"
        raise UsageError(f"augment.{what} is {value!r}; it must be {noun} {rule}")


def _in_order(what: str, bounds: Any, high: float = math.inf) -> None:
    numbers = np.shape(bounds) == (2,) and all(map(_is_number, bounds))
    if not (numbers and 0 < bounds[0] <= bounds[1] <= high and bounds[1] < math.inf):
        rule = "0 < least <= greatest" + ("" if high == math.inf else f" <= {high}")
        raise UsageError(f"augment.{what} is {bounds!r}; it must be two numbers, {rule}")
