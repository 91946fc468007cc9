"""Readers of local files: what they give, and that damage is named with its file."""

import gzip
import pathlib
import pickle
import struct

import numpy as np
import pytest

from haikutrain import readers
from haikutrain.errors import UsageError

RNG = np.random.default_rng(0)


def message(function, *args, **kwargs):
    with pytest.raises(UsageError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


# --- npz -----------------------------------------------------------------------------------------


def test_npz_gives_the_arrays_as_they_were_saved(tmp_path):
    arrays = {"x": RNG.normal(size=(5, 2)).astype(np.float16), "y": np.arange(5, dtype=np.uint8)}
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    read = readers.read_npz(tmp_path / "a.npz")
    assert {name: array.dtype for name, array in read.items()} == {"x": np.float16, "y": np.uint8}
    assert all((read[name] == arrays[name]).all() for name in arrays)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a reader has unpickled something",))


@pytest.mark.parametrize(
    "arrays, words",
    [
        ({"x": np.zeros(4), "y": np.zeros(3)}, "{'x': 4, 'y': 3} rows"),
        ({"x": np.zeros((0, 2))}, "{'x': 0} rows"),
        ({}, "no rows"),
        ({"x": np.float32(1)}, "'x' has dtype float32, shape ()"),
        ({"x": np.array(["a", "b"])}, "'x' has dtype <U1"),
        ({"x": np.array([Bomb()], object)}, "allow_pickle=False"),
    ],
    ids=["sizes", "rows", "nothing", "scalar", "text", "pickle"],
)
def test_npz_of_something_else_is_refused(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    said = message(readers.read_npz, tmp_path / "a.npz")
    assert f"{tmp_path}/a.npz: " in said
    assert words in said


def test_a_damaged_npz_is_named(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=RNG.integers(0, 256, 5000, dtype=np.uint8))
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[2500] ^= 1  # Inside the array: only the archive's checksum can tell.
    other = b"", b"PK\x03\x04", b"text", pickle.dumps(Bomb())
    for content in (whole[:3000], bytes(flipped), *other):
        path.write_bytes(content)
        assert str(path) in message(readers.read_npz, path)
    np.save(tmp_path / "a.npy", np.zeros(3))
    assert "a single array" in message(readers.read_npz, tmp_path / "a.npy")
    assert "No such file" in message(readers.read_npz, tmp_path / "none.npz")


# --- MNIST ---------------------------------------------------------------------------------------


def idx(array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def write_mnist(directory, prefix, separator="-", compress=False, examples=6):
    images = RNG.integers(0, 256, (examples, 28, 28), dtype=np.uint8)
    labels = RNG.integers(0, 10, examples, dtype=np.uint8)
    paths = []
    for stem, kind, array in (("images", "idx3", images), ("labels", "idx1", labels)):
        path = directory / f"{prefix}-{stem}{separator}{kind}-ubyte{'.gz' if compress else ''}"
        path.write_bytes(gzip.compress(idx(array)) if compress else idx(array))
        paths.append(path)
    return images, labels, *paths


@pytest.mark.parametrize("separator", ["-", "."])
@pytest.mark.parametrize("compress", [False, True])
def test_mnist_in_every_form_that_it_is_found_in(tmp_path, separator, compress):
    train = write_mnist(tmp_path, "train", separator, compress, examples=6)
    test = write_mnist(tmp_path, "t10k", separator, compress, examples=4)
    for split, (images, labels, *_) in (("train", train), ("test", test)):
        read = readers.read_mnist(str(tmp_path), split)
        assert read["image"].shape == (len(labels), 28, 28, 1)
        assert (read["image"].dtype, read["label"].dtype) == (np.uint8, np.int32)
        np.testing.assert_array_equal(read["image"][..., 0], images)
        np.testing.assert_array_equal(read["label"], labels)


def test_damaged_idx_files_are_named(tmp_path):
    *_, images, labels = write_mnist(tmp_path, "train")
    whole = images.read_bytes()
    for content, words in [
        (whole[:-1], "4703 bytes of data for the shape [6, 28, 28]"),
        (whole + b"0", "4705 bytes"),
        (whole[:9], "00 00 08 03"),
        (b"", "none"),
        (b"\x00\x00\x0d\x03" + whole[4:], "00 00 0d 03"),  # float32
        (idx(np.zeros((0, 28, 28), np.uint8)), "0 bytes of data for the shape [0, 28, 28]"),
    ]:
        images.write_bytes(content)
        said = message(readers.read_mnist, tmp_path, "train")
        assert f"{images}: " in said
        assert words in said
    images.write_bytes(whole)
    labels.write_bytes(idx(np.zeros(5, np.uint8)))
    assert f"{labels}: 5 labels; expected one for each of 6 images" in message(
        readers.read_mnist, tmp_path, "train"
    )


@pytest.mark.parametrize("damage", [lambda c: c[: len(c) // 2], lambda c: b"", lambda c: c[:-8]])
def test_a_damaged_gzip_is_named(tmp_path, damage):
    *_, images, _ = write_mnist(tmp_path, "train", compress=True)
    images.write_bytes(damage(images.read_bytes()))
    assert str(images) in message(readers.read_mnist, tmp_path, "train")


def test_missing_mnist_says_which_names_were_looked_for(tmp_path):
    said = message(readers.read_mnist, tmp_path, "test")
    assert "t10k-images-idx3-ubyte or t10k-images-idx3-ubyte.gz or t10k-images.idx3-ubyte" in said
    assert str(tmp_path) in said
    assert "'train' or 'test'" in message(readers.read_mnist, tmp_path, "eval")


# --- CIFAR ---------------------------------------------------------------------------------------


def write_cifar(path, labels):
    images = RNG.integers(0, 256, (len(labels), 32, 32, 3), dtype=np.uint8)
    planes = images.transpose(0, 3, 1, 2).reshape(len(labels), -1)
    path.write_bytes(np.concatenate([np.array(labels, np.uint8), planes], axis=1).tobytes())
    return images


@pytest.mark.parametrize("folder", ["", "cifar-10-batches-bin"])
def test_cifar_10(tmp_path, folder):
    home = tmp_path / folder
    home.mkdir(exist_ok=True)
    images = [write_cifar(home / f"data_batch_{i}.bin", [[i], [9]]) for i in range(1, 6)]
    test = write_cifar(home / "test_batch.bin", [[7]])
    read = readers.read_cifar(tmp_path, "train")
    np.testing.assert_array_equal(read["image"], np.concatenate(images))
    assert read["label"].tolist() == [1, 9, 2, 9, 3, 9, 4, 9, 5, 9]
    assert (read["image"].dtype, read["label"].dtype) == (np.uint8, np.int32)
    np.testing.assert_array_equal(readers.read_cifar(tmp_path, "test")["image"], test)


def test_cifar_100_has_two_kinds_of_labels(tmp_path):
    images = write_cifar(tmp_path / "train.bin", [[19, 99], [3, 42]])
    read = readers.read_cifar(tmp_path, "train", classes=100)
    np.testing.assert_array_equal(read["image"], images)
    assert read["coarse_label"].tolist() == [19, 3]
    assert read["label"].tolist() == [99, 42]
    assert read["coarse_label"].dtype == read["label"].dtype == np.int32


def test_damaged_cifar_is_named(tmp_path):
    path = tmp_path / "test_batch.bin"
    write_cifar(path, [[1], [2]])
    whole = path.read_bytes()
    for content, words in [
        (whole[:-1], "6145 bytes; expected records of 3073"),
        (b"", "0 bytes"),
        (b"\x0a" + whole[1:], "label 10 of 10 classes"),
    ]:
        path.write_bytes(content)
        said = message(readers.read_cifar, tmp_path, "test")
        assert f"{path}: " in said
        assert words in said
    assert f"no data_batch_1.bin in {tmp_path}" in message(readers.read_cifar, tmp_path, "train")
    assert "classes=20" in message(readers.read_cifar, tmp_path, "train", classes=20)


def test_readers_import_no_library_before_it_is_needed(command):
    code = "import sys; from haikutrain import pipeline, readers; print(sorted(sys.modules))"
    loaded = command("-c", code, cwd=pathlib.Path(__file__).parents[1]).stdout
    assert "'haikutrain.readers'" in loaded
    assert not any(f"'{name}'" in loaded for name in ("grain", "PIL", "array_record"))
