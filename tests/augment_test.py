"""Augmentations against NumPy by hand, with the numbers that each docstring says are drawn."""

import colorsys
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haikutrain import augment
from haikutrain.errors import UsageError

KEY = jax.random.key(7)
B, H, W = 12, 7, 9


def pictures(rows=B, height=H, width=W, channels=3):
    random = np.random.default_rng(0)
    return random.random((rows, height, width, channels)).astype(np.float32)


def row_keys(rows=B):
    return jax.random.split(KEY, rows)


def run(function, images, *args, **kwargs):
    """The result as NumPy, from a compiled function, as in an update."""
    call = jax.jit(lambda key, images: function(key, images, *args, **kwargs))
    return np.asarray(call(KEY, images))


def chosen(keys, probability):
    return np.array([bool(jax.random.bernoulli(key, probability)) for key in keys])


# --- geometry --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_a_crop_is_a_window_of_the_padded_image(dtype):
    images = (pictures() * 255).astype(dtype)
    cropped = run(augment.random_crop, images, 3)
    assert cropped.dtype == dtype
    for key, image, result in zip(row_keys(), images, cropped, strict=True):
        top, left = jax.random.randint(key, (2,), 0, 7)
        padded = np.zeros((H + 6, W + 6, 3), dtype)
        padded[3 : 3 + H, 3 : 3 + W] = image
        np.testing.assert_array_equal(result, padded[top : top + H, left : left + W])


def test_every_window_occurs_about_equally_often():
    # One pixel in the middle: where it lands is the offset.
    images = np.zeros((2500, 5, 5, 1), np.float32)
    images[:, 2, 2] = 1
    counts = run(augment.random_crop, images, 2).sum(axis=0)
    # 25 offsets, 100 each expected, deviation 9.8: five of them on each side.
    assert counts.sum() == 2500
    assert counts.min() > 51
    assert counts.max() < 149


@pytest.mark.parametrize("probability", [0.0, 0.2, 0.5, 1.0])
def test_a_flip_mirrors_the_width_of_as_many_rows_as_said(probability):
    images = np.arange(1000 * 6, dtype=np.int32).reshape(1000, 1, 3, 2)
    flipped = run(augment.random_flip, images, probability=probability)
    mirrored = (flipped == images[:, :, ::-1]).all(axis=(1, 2, 3))
    kept = (flipped == images).all(axis=(1, 2, 3))
    assert (mirrored ^ kept).all()
    # Four deviations of a binomial.
    bound = 4 * math.sqrt(1000 * probability * (1 - probability))
    assert abs(mirrored.sum() - 1000 * probability) <= bound


def covers(images, covered):
    return (covered != images).all(axis=-1)


@pytest.mark.parametrize("size", [0, 3, 4, 50])
def test_cutout_covers_a_square_around_a_pixel_of_the_image(size):
    images = pictures()
    cover = covers(images, run(augment.cutout, images, size, fill=-1.0))
    for key, mask in zip(row_keys(), cover, strict=True):
        y, x = jax.random.randint(key, (2,), 0, np.array([H, W]))
        expected = np.zeros((H, W), bool)
        top, left = int(y) - size // 2, int(x) - size // 2
        expected[max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)] = True
        np.testing.assert_array_equal(mask, expected)


def test_cutout_covers_exactly_its_area_where_it_is_inside():
    images = np.ones((64, 32, 32, 1), np.float32)
    covered = 64 - np.array(run(augment.cutout, images, 8).sum(axis=(1, 2, 3))) + 960
    inside = 0
    for key, pixels in zip(row_keys(64), covered, strict=True):
        y, x = np.asarray(jax.random.randint(key, (2,), 0, np.array([32, 32])))
        if 4 <= y <= 28 and 4 <= x <= 28:
            inside += 1
            assert pixels == 64
        else:
            assert 16 <= pixels < 64
    assert inside > 20


def test_cutout_fills_each_channel_with_its_own_value():
    images = np.zeros((4, H, W, 3), np.uint8)
    covered = run(augment.cutout, images, 40, fill=(1, 2, 3))
    assert covered.dtype == np.uint8
    np.testing.assert_array_equal(covered, np.broadcast_to([1, 2, 3], images.shape))


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


def drawn_window(key, height, width, scale, ratio):
    area_key, ratio_key, place_key = jax.random.split(key, 3)
    fractions = jax.random.uniform(area_key, (10,), jnp.float32, *scale)
    logs = jax.random.uniform(ratio_key, (10,), jnp.float32, *map(math.log, ratio))
    for fraction, shape in zip(np.asarray(fractions), np.exp(np.asarray(logs)), strict=True):
        h = round(math.sqrt(height * width * fraction / shape))
        w = round(math.sqrt(height * width * fraction * shape))
        if 0 < h <= height and 0 < w <= width:
            room = np.array([height - h + 1, width - w + 1])
            top, left = np.asarray(jax.random.randint(place_key, (2,), 0, room))
            return slice(top, top + h), slice(left, left + w)
    raise AssertionError("no window fits")


@pytest.mark.parametrize("size, cubic", [((5, 12), False), (20, False), ((5, 12), True)])
def test_a_resized_crop_is_a_window_resized_alone(size, cubic):
    images = pictures(height=16, width=14)
    result = run(augment.random_resized_crop, images, size, cubic=cubic)
    height, width = size if isinstance(size, tuple) else (size, size)
    assert result.shape == (B, height, width, 3)
    for key, image, got in zip(row_keys(), images, result, strict=True):
        window = image[drawn_window(key, 16, 14, (0.08, 1.0), (3 / 4, 4 / 3))].astype(np.float64)
        kernel = keys_cubic if cubic else triangle
        half = resized(window, height, kernel)
        expected = resized(half.swapaxes(0, 1), width, kernel).swapaxes(0, 1)
        np.testing.assert_allclose(got, expected.clip(0, 1), atol=2e-5)


def test_a_resized_crop_of_everything_to_the_same_size_is_the_image():
    images = pictures()
    ratio = (W / H, W / H)
    result = run(augment.random_resized_crop, images, (H, W), scale=(1.0, 1.0), ratio=ratio)
    np.testing.assert_allclose(result, images, atol=1e-6)


@pytest.mark.parametrize("ratio, rows, columns", [(3, (4, 8), (0, 12)), (1 / 4, (0, 12), (4, 7))])
def test_where_no_window_fits_it_is_the_largest_in_the_middle(ratio, rows, columns):
    # Of a square's whole area and three times as wide as high: never inside.
    images = pictures(height=12, width=12)
    window = images[:, slice(*rows), slice(*columns)]
    size = window.shape[1:3]
    result = run(
        augment.random_resized_crop, images, size, scale=(1.0, 1.0), ratio=(ratio, ratio)
    )
    np.testing.assert_allclose(result, window, atol=1e-6)


# --- mixing ----------------------------------------------------------------------------------


def test_mixup_mixes_images_and_labels_by_one_weight_a_row():
    images, labels = pictures(), np.eye(B, dtype=np.float32)
    mixed, mixed_labels = jax.jit(lambda *args: augment.mixup(*args, 0.4))(KEY, images, labels)
    weights_key, partners_key = jax.random.split(KEY)
    weights = np.asarray(jax.random.beta(weights_key, 0.4, 0.4, (B,)))
    partners = np.asarray(jax.random.permutation(partners_key, B))
    assert len(set(weights.tolist())) == B
    for i, (w, p) in enumerate(zip(weights, partners, strict=True)):
        np.testing.assert_allclose(mixed[i], w * images[i] + (1 - w) * images[p], atol=1e-6)
        np.testing.assert_allclose(mixed_labels[i], w * labels[i] + (1 - w) * labels[p], atol=1e-6)
    np.testing.assert_allclose(np.sum(mixed_labels, axis=1), np.ones(B), atol=1e-6)


def test_the_smaller_mixups_alpha_the_less_is_mixed():
    labels = jnp.eye(2)[jnp.arange(2000) % 2]
    images = jnp.zeros((2000, 1, 1, 1))

    @jax.jit
    def purity(key):
        # For another label as partner: E[max(w, 1 - w)], 3/4 for a uniform w.
        mixed = [augment.mixup(key, images, labels, alpha)[1].max(axis=1) for alpha in (1.0, 0.05)]
        return [jnp.where(m == 1, jnp.nan, m) for m in mixed]

    uniform, sharp = (float(jnp.nanmean(m)) for m in purity(KEY))
    assert abs(uniform - 0.75) < 0.02
    assert sharp > 0.9


# --- colours ---------------------------------------------------------------------------------


def luma(image):
    return image @ np.array([0.299, 0.587, 0.114])


def jittered_by_hand(key, image, strengths):
    """torchvision's ColorJitter, a pixel at a time."""
    _, order_key, amounts_key = jax.random.split(key, 3)
    kinds = np.array([i for i, strength in enumerate(strengths) if strength])
    amounts = np.array(strengths) * jax.random.uniform(amounts_key, (4,), minval=-1, maxval=1)
    image = image.astype(np.float64)
    for kind in np.asarray(jax.random.permutation(order_key, kinds)):
        amount = float(amounts[kind])
        if kind == 3:
            flat = [colorsys.rgb_to_hsv(*pixel) for pixel in image.reshape(-1, 3)]
            turned = [colorsys.hsv_to_rgb((h + amount) % 1, s, v) for h, s, v in flat]
            image = np.array(turned).reshape(image.shape)
            continue
        origin = [0.0, luma(image).mean(), luma(image)[..., None]][kind]
        image = np.clip((1 + amount) * image - amount * origin, 0, 1)
    return image


@pytest.mark.parametrize("strengths", [(0.4, 0.8, 0.9, 0.3), (0, 0, 0, 0.5), (0, 0.7, 1, 0)])
def test_color_jitter_is_brightness_contrast_saturation_and_hue_in_the_drawn_order(strengths):
    images = pictures()
    result = run(augment.color_jitter, images, *strengths)
    for key, image, got in zip(row_keys(), images, result, strict=True):
        np.testing.assert_allclose(got, jittered_by_hand(key, image, strengths), atol=2e-5)


def test_color_jitter_changes_only_the_rows_chosen_and_nothing_without_strength():
    images = pictures()
    result = run(augment.color_jitter, images, brightness=0.5, probability=0.4)
    changed = (result != images).any(axis=(1, 2, 3))
    keys = [jax.random.split(key, 3)[0] for key in row_keys()]
    np.testing.assert_array_equal(changed, chosen(keys, 0.4))
    assert 0 < changed.sum() < B
    np.testing.assert_array_equal(run(augment.color_jitter, images), images)


def test_gray_images_have_no_hue_or_saturation_to_change():
    gray = np.repeat(pictures(channels=1), 3, axis=-1)
    result = run(augment.color_jitter, gray, saturation=1.0, hue=0.5)
    np.testing.assert_allclose(result, gray, atol=1e-6)
    one = run(augment.color_jitter, gray[..., :1], brightness=0.5, contrast=0.5)
    three = run(augment.color_jitter, gray, brightness=0.5, contrast=0.5)
    np.testing.assert_allclose(np.repeat(one, 3, axis=-1), three, atol=1e-6)


def test_black_and_white_stay_finite_and_in_range():
    images = np.stack([np.zeros((H, W, 3)), np.ones((H, W, 3))]).astype(np.float32)
    result = run(augment.color_jitter, images, 1.0, 1.0, 1.0, 0.5)
    assert np.isfinite(result).all()
    assert (result.min(), result.max()) >= (0, 0)
    assert result.max() <= 1


def test_grayscale_is_the_luma_in_each_channel():
    images = pictures()
    result = run(augment.random_grayscale, images, probability=0.5)
    gray = chosen(row_keys(), 0.5)
    assert 0 < gray.sum() < B
    expected = np.where(gray[:, None, None, None], luma(images)[..., None], images)
    np.testing.assert_allclose(result, expected, atol=1e-6)


def test_a_blur_is_a_convolution_by_a_gaussian_of_the_drawn_width():
    images = pictures()
    result = run(augment.gaussian_blur, images, 5, (0.5, 2.0), probability=0.6)
    for key, image, got in zip(row_keys(), images, result, strict=True):
        chosen_key, sigma_key = jax.random.split(key)
        sigma = float(jax.random.uniform(sigma_key, (), minval=0.5, maxval=2.0))
        expected = np.zeros(image.shape)
        for y, x in np.ndindex(H, W):
            total = 0.0
            for dy, dx in np.ndindex(5, 5):
                v, u = y + dy - 2, x + dx - 2
                if 0 <= v < H and 0 <= u < W:
                    weight = math.exp(-((dy - 2) ** 2 + (dx - 2) ** 2) / (2 * sigma**2))
                    expected[y, x] += weight * image[v, u]
                    total += weight
            expected[y, x] /= total
        blurred = chosen([chosen_key], 0.6)[0]
        np.testing.assert_allclose(got, expected if blurred else image, atol=1e-5)


def test_solarize_inverts_what_is_bright():
    images = np.array([0, 0.25, 0.5, 0.75, 1], np.float32).reshape(1, 1, 5, 1)
    images = np.repeat(images, B, axis=0)
    result = run(augment.solarize, images, probability=0.5)
    inverted = chosen(row_keys(), 0.5)
    assert 0 < inverted.sum() < B
    for was, got in zip(inverted, result, strict=True):
        assert got.ravel().tolist() == ([0, 0.25, 0.5, 0.25, 0] if was else [0, 0.25, 0.5, 0.75, 1])


# --- all -------------------------------------------------------------------------------------

ALL = {
    "random_crop": augment.random_crop,
    "random_flip": augment.random_flip,
    "random_resized_crop": lambda k, x: augment.random_resized_crop(k, x, (H, W)),
    "cutout": lambda k, x: augment.cutout(k, x, 3),
    "mixup": lambda k, x: augment.mixup(k, x, jnp.ones((len(x), 1)), 1.0)[0],
    "color_jitter": lambda k, x: augment.color_jitter(k, x, 0.4, 0.4, 0.2, 0.1),
    "random_grayscale": lambda k, x: augment.random_grayscale(k, x, probability=0.5),
    "gaussian_blur": lambda k, x: augment.gaussian_blur(k, x, 3),
    "solarize": lambda k, x: augment.solarize(k, x, probability=0.5),
}


@pytest.mark.parametrize("name", ALL)
def test_shape_and_dtype_are_kept_and_the_program_does_not_grow_with_the_batch(name):
    def program(rows, dtype):
        images = jax.ShapeDtypeStruct((rows, H, W, 3), dtype)
        return jax.make_jaxpr(ALL[name], return_shape=True)(KEY, images)

    for dtype in ("float32", "bfloat16", "float16"):
        _, result = program(5, dtype)
        assert (result.shape, result.dtype) == ((5, H, W, 3), dtype)
    counts = [str(program(rows, "float32")[0]).count("\n") for rows in (5, 50)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ALL)
def test_equal_images_become_different_rows_and_another_key_different_ones(name):
    images = np.repeat(pictures(1, 9, 9), 32, axis=0)
    if name == "mixup":  # It has nothing to do with equal ones.
        images = pictures(32, 9, 9)
    function = jax.jit(lambda key: ALL_SQUARE[name](key, images))
    first, again, other = (np.asarray(function(key)) for key in (KEY, KEY, jax.random.key(8)))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert len({row.tobytes() for row in first}) > 1


ALL_SQUARE = ALL | {"random_resized_crop": lambda k, x: augment.random_resized_crop(k, x, 9)}


