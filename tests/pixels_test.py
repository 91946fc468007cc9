"""Colours, resized windows and blurs, against arithmetic on single pixels."""

import colorsys
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haikutrain import augment, pixels

KEY = jax.random.PRNGKey(7)
B, H, W = 12, 7, 9
# Compiling is most of these tests' time.
FAST = {"xla_backend_optimization_level": 0}


def pictures(height=H, width=W, channels=3):
    """Noise, and a black, a gray and a white picture."""
    random = np.random.default_rng(0)
    images = random.random((B, height, width, channels)).astype(np.float32)
    images[:3] = np.array([0, 0.5, 1]).reshape(3, 1, 1, 1)
    return images


def run(function, images, *args, **kwargs):
    """The result as NumPy, from a compiled function, as in an update."""
    call = jax.jit(lambda k, x: function(k, x, *args, **kwargs), compiler_options=FAST)
    return np.asarray(call(KEY, images))


def drawn(rule):
    """What each row's key gives by a rule."""
    draw = jax.jit(lambda key: jax.vmap(rule)(jax.random.split(key, B)), compiler_options=FAST)
    return jax.tree.map(np.asarray, draw(KEY))


# --- colours ---------------------------------------------------------------------------------


def luma(image):
    return image if image.shape[-1] == 1 else (image @ np.array([0.299, 0.587, 0.114]))[..., None]


def jittered_by_hand(image, order, amounts):
    """torchvision's ColorJitter, a pixel at a time."""
    image = image.astype(np.float64)
    for kind in order:
        if kind == 3:
            flat = [colorsys.rgb_to_hsv(*pixel) for pixel in image.reshape(-1, 3)]
            turned = [colorsys.hsv_to_rgb((h + amounts[3]) % 1, s, v) for h, s, v in flat]
            image = np.array(turned).reshape(image.shape)
            continue
        origin = [0.0, luma(image).mean(), luma(image)][kind]
        image = np.clip((1 + amounts[kind]) * image - amounts[kind] * origin, 0, 1)
    return image


@pytest.mark.parametrize(
    "strengths, channels", [((0.4, 0.8, 0.9, 0.3), 3), ((0, 0, 0, 0.5), 3), ((0.6, 0.7, 0, 0), 1)]
)
def test_color_jitter_does_what_it_says_in_the_drawn_order(strengths, channels):
    images = pictures(channels=channels)
    result = run(augment.color_jitter, images, *strengths, probability=0.8)
    kinds = jnp.array([i for i, strength in enumerate(strengths) if strength])

    def rule(key):
        chosen, order, amounts = jax.random.split(key, 3)
        return (
            jax.random.bernoulli(chosen, 0.8),
            jax.random.permutation(order, kinds),
            jax.random.uniform(amounts, (4,), minval=-1, maxval=1),
        )

    chosen, orders, amounts = drawn(rule)
    assert 0 < chosen.sum() < B
    for i, image in enumerate(images):
        by_hand = jittered_by_hand(image, orders[i], amounts[i] * np.array(strengths))
        np.testing.assert_allclose(result[i], by_hand if chosen[i] else image, atol=2e-5)


def test_color_jitter_without_strength_changes_nothing():
    images = pictures()
    np.testing.assert_array_equal(run(augment.color_jitter, images), images)


@pytest.mark.parametrize("turns", [0.0, 1.0, -1.0])
def test_a_hue_turned_by_whole_circles_is_what_it_was(turns):
    image = pictures()[5]
    np.testing.assert_allclose(pixels.hue_turned(image, turns), image, atol=1e-6)


def test_a_third_of_a_circle_makes_red_to_green_to_blue():
    image = np.float32([[[0.9, 0.2, 0.3]]])
    green = pixels.hue_turned(image, 1 / 3)
    np.testing.assert_allclose(green, [[[0.3, 0.9, 0.2]]], atol=1e-6)
    np.testing.assert_allclose(pixels.hue_turned(green, 1 / 3), [[[0.2, 0.3, 0.9]]], atol=1e-6)


def test_grayscale_is_the_luma_in_each_channel():
    images = pictures()
    result = run(augment.random_grayscale, images, probability=0.5)
    gray = drawn(lambda k: jax.random.bernoulli(k, 0.5))
    assert 0 < gray.sum() < B
    expected = np.where(gray[:, None, None, None], luma(images), images)
    np.testing.assert_allclose(result, expected, atol=1e-6)


# --- resized crops ---------------------------------------------------------------------------


def triangle(x):
    return max(0.0, 1 - abs(x))


def keys_cubic(x):
    x = abs(x)
    if x < 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0


def resized(line, new_size, kernel):
    """The first axis of `line` at another size, one new pixel after the other."""
    step = len(line) / new_size
    result = []
    for i in range(new_size):
        centre = (i + 0.5) * step - 0.5
        weights = np.array([kernel((j - centre) / max(step, 1)) for j in range(len(line))])
        result.append(np.tensordot(weights / weights.sum(), line, axes=1))
    return np.stack(result)


def drawn_windows(height, width, scale, ratio):
    """Slices of rows and columns."""

    def numbers(key):
        area, shape, _ = jax.random.split(key, 3)
        logs = jax.random.uniform(shape, (10,), jnp.float32, *map(math.log, ratio))
        return jax.random.uniform(area, (10,), jnp.float32, *scale), jnp.exp(logs)

    for key, *pairs in zip(jax.random.split(KEY, B), *drawn(numbers), strict=True):
        for fraction, shape in zip(*pairs, strict=True):
            h = round(math.sqrt(height * width * fraction / shape))
            w = round(math.sqrt(height * width * fraction * shape))
            if 0 < h <= height and 0 < w <= width:
                break
        room = np.array([height - h + 1, width - w + 1])
        top, left = np.asarray(jax.random.randint(jax.random.split(key, 3)[2], (2,), 0, room))
        yield slice(top, top + h), slice(left, left + w)


@pytest.mark.parametrize("size, cubic", [((5, 12), False), (20, True)])
def test_a_resized_crop_is_a_window_resized_alone(size, cubic):
    images = pictures(height=16, width=14)
    result = run(augment.random_resized_crop, images, size, cubic=cubic)
    height, width = size if isinstance(size, tuple) else (size, size)
    assert result.shape == (B, height, width, 3)
    kernel = keys_cubic if cubic else triangle
    windows = list(drawn_windows(16, 14, (0.08, 1.0), (3 / 4, 4 / 3)))
    assert len({(rows.stop - rows.start, columns.start) for rows, columns in windows}) > 6
    for window, image, got in zip(windows, images, result, strict=True):
        half = resized(image[window].astype(np.float64), height, kernel)
        expected = resized(half.swapaxes(0, 1), width, kernel).swapaxes(0, 1)
        np.testing.assert_allclose(got, expected.clip(0, 1), atol=2e-5)


@pytest.mark.parametrize("cubic", [False, True])
def test_a_window_that_keeps_its_size_is_copied(cubic):
    weights = pixels.resize_weights(9, 5, 3, 5, cubic)
    np.testing.assert_allclose(weights, np.eye(9)[3:8], atol=1e-7)


@pytest.mark.parametrize(
    "ratio, start, sides", [(3, [4, 0], [4, 12]), (1 / 4, [0, 4], [12, 3]), (1, [0, 0], [12, 12])]
)
def test_where_no_window_fits_it_is_the_largest_in_the_middle(ratio, start, sides):
    # All of a square's area, three times as wide as high, is never inside it.
    window = pixels.window(KEY, (12, 12), (1.0, 1.0), (ratio, ratio))
    assert [part.tolist() for part in window] == [start, sides]


# --- blurs -----------------------------------------------------------------------------------


def blurred_by_hand(image, kernel_size, sigma):
    """One new pixel after the other, over the old ones that exist."""
    reach = kernel_size // 2
    result = np.zeros(image.shape)
    for y, x in np.ndindex(H, W):
        total = 0.0
        for v in range(max(0, y - reach), min(H, y + reach + 1)):
            for u in range(max(0, x - reach), min(W, x + reach + 1)):
                weight = math.exp(-((v - y) ** 2 + (u - x) ** 2) / (2 * sigma**2))
                result[y, x] += weight * image[v, u]
                total += weight
        result[y, x] /= total
    return result


def test_a_blur_is_a_convolution_by_a_gaussian_of_the_drawn_width():
    images = pictures()
    result = run(augment.gaussian_blur, images, 5, (0.5, 2.0), probability=0.6)

    def rule(key):
        chosen, width = jax.random.split(key)
        return jax.random.bernoulli(chosen, 0.6), jax.random.uniform(
            width, (), minval=0.5, maxval=2
        )

    chosen, sigmas = drawn(rule)
    assert 0 < chosen[3:].sum() < B - 3
    for image, got, was, sigma in zip(images, result, chosen, sigmas, strict=True):
        expected = blurred_by_hand(image, 5, float(sigma)) if was else image
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("sigma", [1e-3, 0.1, 100.0])
def test_a_blur_keeps_what_is_constant_however_wide(sigma):
    weights = np.asarray(pixels.blur_weights(9, 2, sigma))
    np.testing.assert_allclose(weights.sum(axis=1), np.ones(9), atol=1e-6)
    if sigma < 0.1:
        np.testing.assert_array_equal(weights, np.eye(9))
    if sigma == 100.0:  # The five pixels in reach, equally; three at the border.
        np.testing.assert_allclose(weights[4, 2:7], np.full(5, 0.2), atol=1e-4)
        np.testing.assert_allclose(weights[0, :3], np.full(3, 1 / 3), atol=1e-4)
