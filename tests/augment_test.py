"""Augmentations against NumPy by hand, with the numbers that each docstring says are drawn."""

import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haikutrain import augment
from haikutrain.errors import UsageError

KEY = jax.random.PRNGKey(7)
B, H, W = 12, 7, 9
# Compiling is most of these tests' time.
FAST = {"xla_backend_optimization_level": 0}


def pictures(rows=B, height=H, width=W):
    random = np.random.default_rng(0)
    return random.random((rows, height, width, 3)).astype(np.float32)


def run(function, images, *args, **kwargs):
    """The result as NumPy, from a compiled function, as in an update."""
    call = jax.jit(lambda k, x: function(k, x, *args, **kwargs), compiler_options=FAST)
    return jax.tree.map(np.asarray, call(KEY, images))


def drawn(rule, rows=B):
    """What each row's key gives by a rule."""
    draw = jax.jit(lambda key: jax.vmap(rule)(jax.random.split(key, rows)), compiler_options=FAST)
    return jax.tree.map(np.asarray, draw(KEY))


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_a_crop_is_a_window_of_the_padded_image(dtype):
    images = (pictures() * 255).astype(dtype)
    cropped = run(augment.random_crop, images, 3)
    assert cropped.dtype == dtype
    corners = drawn(lambda k: jax.random.randint(k, (2,), 0, 7))
    for (top, left), image, result in zip(corners, images, cropped, strict=True):
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


@pytest.mark.parametrize("size", [0, 3, 4, 50])
def test_cutout_covers_a_square_around_a_pixel_of_the_image(size):
    cover = (run(augment.cutout, pictures(), size, fill=-1.0) == -1).all(axis=-1)
    centres = drawn(lambda k: jax.random.randint(k, (2,), 0, jnp.array([H, W])))
    for (y, x), mask in zip(centres, cover, strict=True):
        top, left = y - size // 2, x - size // 2
        expected = np.zeros((H, W), bool)
        expected[max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)] = True
        np.testing.assert_array_equal(mask, expected)


def test_cutout_covers_exactly_its_area_where_it_is_inside():
    areas = (run(augment.cutout, np.ones((64, 32, 32, 1), np.float32), 8) == 0).sum(axis=(1, 2, 3))
    centres = drawn(lambda k: jax.random.randint(k, (2,), 0, jnp.array([32, 32])), 64)
    inside = ((centres >= 4) & (centres <= 28)).all(axis=1)
    assert 20 < inside.sum() < 64
    assert set(areas[inside]) == {64}
    # A corner shows at least a quarter.
    assert (areas[~inside] >= 16).all()
    assert (areas[~inside] < 64).all()


def test_cutout_fills_each_channel_with_its_own_value():
    images = np.zeros((4, H, W, 3), np.uint8)
    covered = run(augment.cutout, images, 40, fill=(1, 2, 3))
    assert covered.dtype == np.uint8
    np.testing.assert_array_equal(covered, np.broadcast_to([1, 2, 3], images.shape))


def test_mixup_mixes_images_and_labels_by_one_weight_a_row():
    images, labels = pictures(), np.eye(B, dtype=np.float32)
    mixed, mixed_labels = run(augment.mixup, images, labels, 0.4)

    def rule(key, x):
        weights_key, partners_key = jax.random.split(key)
        weights = jax.random.beta(weights_key, 0.4, 0.4, (len(x),))
        return weights, jax.random.permutation(partners_key, len(x))

    weights, partners = run(rule, images)
    assert len(set(weights.tolist())) == B
    for i, (w, p) in enumerate(zip(weights, partners, strict=True)):
        np.testing.assert_allclose(mixed[i], w * images[i] + (1 - w) * images[p], atol=1e-6)
        np.testing.assert_allclose(mixed_labels[i], w * labels[i] + (1 - w) * labels[p], atol=1e-6)
    np.testing.assert_allclose(mixed_labels.sum(axis=1), np.ones(B), atol=1e-6)


@pytest.mark.parametrize(
    "given, expected", [((), [0, 0.25, 0.5, 0.25, 0]), ((0.25,), [0, 0.75, 0.5, 0.25, 0])]
)
def test_solarize_inverts_what_is_bright(given, expected):
    scale = [0, 0.25, 0.5, 0.75, 1]
    images = np.tile(np.array(scale, np.float32)[:, None], (B, 1, 1, 1))
    result = run(augment.solarize, images, *given, probability=0.5)
    inverted = drawn(lambda k: jax.random.bernoulli(k, 0.5))
    assert 0 < inverted.sum() < B
    for was, got in zip(inverted, result, strict=True):
        assert got.ravel().tolist() == (expected if was else scale)


ALL = {
    "random_crop": augment.random_crop,
    "random_flip": augment.random_flip,
    "random_resized_crop": lambda k, x: augment.random_resized_crop(k, x, (H, W)),
    "cutout": lambda k, x: augment.cutout(k, x, 3),
    "mixup": lambda k, x: augment.mixup(k, x, jnp.ones((len(x), 1)), 1.0)[0],
    "color_jitter": lambda k, x: augment.color_jitter(k, x, 0.4, 0.4, 0.2, 0.1),
    "random_grayscale": augment.random_grayscale,
    "gaussian_blur": lambda k, x: augment.gaussian_blur(k, x, 3),
    "solarize": augment.solarize,
}


@pytest.mark.parametrize("name", ALL)
def test_shape_and_dtype_are_kept_and_the_program_does_not_grow_with_the_batch(name):
    sizes = []
    for rows, dtype in (5, "bfloat16"), (50, "float16"):
        images = jax.ShapeDtypeStruct((rows, H, W, 3), dtype)
        program, result = jax.make_jaxpr(ALL[name], return_shape=True)(KEY, images)
        assert (result.shape, result.dtype) == (images.shape, dtype)
        sizes.append(str(program).count(" = "))
    assert sizes[0] == sizes[1] > 1


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_typed_keys_of_all_kinds_will_do(kind):
    images, key = np.repeat(pictures(1), 32, axis=0), jax.random.key(3, impl=kind)
    cropped = jax.jit(augment.random_crop, compiler_options=FAST)(key, images)
    assert len({row.tobytes() for row in np.asarray(cropped)}) > 10


def test_inside_haiku_and_under_pmap_each_device_does_what_it_would_alone():
    def view(images):
        x = augment.random_crop(hk.next_rng_key(), images)
        x = augment.random_flip(hk.next_rng_key(), x)
        return augment.color_jitter(hk.next_rng_key(), x, 0.4, probability=0.8)

    def apply(key, images):
        return hk.transform(view).apply({}, key, images)

    keys, images = jax.random.split(KEY, 4), np.repeat(pictures(1), 8, axis=0)
    together = np.asarray(jax.pmap(apply)(keys, images.reshape(4, 2, H, W, 3)))
    assert len({row.tobytes() for row in together.reshape(images.shape)}) == 8
    alone = jax.jit(apply, compiler_options=FAST)
    for key, got in zip(keys, together, strict=True):
        np.testing.assert_allclose(got, alone(key, images[:2]), atol=1e-6)


X = np.zeros((2, 8, 8, 3), np.float32)
MISTAKES = [
    (lambda: augment.random_flip(KEY, X[0]), "random_flip: images are float32[8, 8, 3]"),
    (lambda: augment.random_flip(iter([KEY]), X), "key is a list_iterator; give hk.next_rng_key()"),
    (
        lambda: augment.random_flip(jax.random.split(KEY), X),
        "shape (2, 2); give one, not one a row",
    ),
    (lambda: augment.random_flip(jax.random.key(0)[None], X), "key has shape (1,)"),
    (lambda: augment.random_flip(KEY, X, probability=1.5), "1.5; it must be a number in [0, 1]"),
    (lambda: augment.random_crop(KEY, X, -1), "padding is -1; it must be an integer >= 0"),
    (lambda: augment.random_crop(KEY, X, 2.0), "padding is 2.0; it must be an integer >= 0"),
    (lambda: augment.random_resized_crop(KEY, X, 0), "size is 0; it must be an integer >= 1"),
    (lambda: augment.random_resized_crop(KEY, X, (8, 8, 3)), "it must be a number or (S, T)"),
    (lambda: augment.random_resized_crop(KEY, X, 8, scale=(0.5, 1.2)), "greatest <= 1"),
    (lambda: augment.random_resized_crop(KEY, X, 8, scale=(0.5, 0.2)), "scale is (0.5, 0.2)"),
    (lambda: augment.random_resized_crop(KEY, X, 8, ratio=(0, 1)), "ratio is (0, 1); it must be"),
    (lambda: augment.random_resized_crop(KEY, X.astype(np.uint8), 8), "floats: images / 255"),
    (lambda: augment.cutout(KEY, X, True), "size is True; it must be an integer >= 0"),
    (lambda: augment.cutout(KEY, X, 2, fill=[0, 1]), "fill has shape (2,), not () or (3,)"),
    (lambda: augment.mixup(KEY, X, np.zeros(2), 1.0), "such as jax.nn.one_hot(label, K)"),
    (lambda: augment.mixup(KEY, X, np.zeros((2, 9), np.int32), 1.0), "labels are int32[2, 9]"),
    (lambda: augment.mixup(KEY, X, np.zeros((3, 9)), 1.0), "they must be float [2, K]"),
    (lambda: augment.mixup(KEY, X, np.zeros((2, 9)), 0), "alpha is 0; it must be a number > 0"),
    (lambda: augment.color_jitter(KEY, X, 1.2), "brightness is 1.2; it must be a number in [0, 1]"),
    (lambda: augment.color_jitter(KEY, X, hue=0.6), "hue is 0.6; it must be a number in [0, 0.5]"),
    (lambda: augment.color_jitter(KEY, X[..., :1], hue=0.1), "they must have 3 channels"),
    (lambda: augment.color_jitter(KEY, X[..., :2], 0.1), "they must have 1 or 3 channels"),
    (lambda: augment.random_grayscale(KEY, X[..., :1]), "they must have 3 channels"),
    (lambda: augment.gaussian_blur(KEY, X, 4), "kernel_size is 4; it must be odd"),
    (lambda: augment.gaussian_blur(KEY, X, 3, (0, 1)), "sigma is (0, 1); it must be two numbers"),
    (lambda: augment.solarize(KEY, X, 2), "threshold is 2; it must be a number in [0, 1]"),
]


@pytest.mark.parametrize("call, message", MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_one_readable_line(call, message):
    with pytest.raises(UsageError) as caught:
        call()
    assert message in str(caught.value)
    assert str(caught.value).startswith("augment.")
    assert "\n" not in str(caught.value)
