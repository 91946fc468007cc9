"""Readers of local files: what they give, and that damage is named with its file."""

import gzip
import pathlib
import pickle
import struct
import sys

import numpy as np
import pytest
from PIL import Image

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


# --- a folder of images --------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Two classes, three images of two sizes, kept without loss."""
    images = {}
    for name, size in (("cat/b.png", (4, 5)), ("ant/2.BMP", (3, 3)), ("cat/a.png", (4, 5))):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        images[name] = RNG.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(images[name]).save(path)
    (tmp_path / "cat/.hidden.png").write_text("no image")
    (tmp_path / "cat/notes.txt").write_text("no image")
    (tmp_path / ".cache").mkdir()
    return tmp_path, images


def test_image_folder_is_sorted_decodes_and_pickles(folder):
    path, images = folder
    source = pickle.loads(pickle.dumps(readers.image_folder(path)))
    assert source.class_names == ["ant", "cat"]
    assert [source.path(i) for i in range(3)] == [
        str(path / name) for name in ("ant/2.BMP", "cat/a.png", "cat/b.png")
    ]
    assert len(source) == 3
    for i, (name, label) in enumerate([("ant/2.BMP", 0), ("cat/a.png", 1), ("cat/b.png", 1)]):
        np.testing.assert_array_equal(source[np.int64(i)]["image"], images[name])
        assert source[i]["image"].dtype == np.uint8
        assert source[i]["label"] == label
    with pytest.raises(IndexError):
        source[3]


def test_class_names_keep_labels_the_same_in_another_split(folder):
    path, _ = folder
    source = readers.image_folder(path, class_names=["ant", "bee", "cat"])
    assert [source[i]["label"] for i in range(3)] == [0, 2, 2]
    said = message(readers.image_folder, path, class_names=["ant", "bee"])
    assert "['ant', 'cat']" in said
    assert "['ant', 'bee']" in said


@pytest.mark.parametrize("mode, value", [("L", 7), ("P", 7), ("RGBA", (7, 7, 7, 0)), ("1", 0)])
def test_every_8_bit_image_becomes_rgb(tmp_path, mode, value):
    (tmp_path / "c").mkdir()
    image = Image.new(mode, (2, 1), value)
    if mode == "P":
        image.putpalette([7] * 768)
        image.save(tmp_path / "c/0.png", transparency=bytes([0] * 256))
    else:
        image.save(tmp_path / "c/0.png")
    shade = 0 if mode == "1" else 7
    np.testing.assert_array_equal(
        readers.image_folder(tmp_path)[0]["image"], np.full((1, 2, 3), shade, np.uint8)
    )


def test_a_damaged_image_is_named(folder):
    path, _ = folder
    source = readers.image_folder(path)
    file = path / "cat/a.png"
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"text"):
        file.write_bytes(content)
        assert f"{file}: " in message(source.__getitem__, 1)
        assert source[2]["label"] == 1
    Image.fromarray(np.zeros((2, 2), np.uint16)).save(file)
    assert f"{file}: its mode is I;16; expected an image of 8 bits" in message(
        source.__getitem__, 1
    )


def test_an_image_of_another_shape_is_named(folder):
    path, _ = folder
    source = readers.image_folder(path, shape=(4, 5))
    assert source[1]["image"].shape == (4, 5, 3)
    said = message(source.__getitem__, 0)
    assert f"{path}/ant/2.BMP: it is an image of (3, 3); expected (H, W) = (4, 5)" in said


def test_a_folder_without_images_is_named(tmp_path):
    assert f"{tmp_path}/none: No such file" in message(readers.image_folder, tmp_path / "none")
    assert f"{tmp_path}: it has the folders []" in message(readers.image_folder, tmp_path)
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path}/empty: no image" in message(readers.image_folder, tmp_path)


def test_without_pillow_the_error_says_how_to_install_it(folder, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "PIL"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install 'haikutrain[images]'" in message(readers.image_folder, folder[0])


# --- array_record --------------------------------------------------------------------------------


def decode(record):
    return np.frombuffer(record, np.uint8).reshape(5000)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    from array_record.python.array_record_module import ArrayRecordWriter

    folder = tmp_path_factory.mktemp("shards")
    records = RNG.integers(0, 256, (7, 5000), dtype=np.uint8)
    for shard, rows in enumerate((records[:4], records[4:], [])):
        writer = ArrayRecordWriter(str(folder / f"{shard}.array_record"), "group_size:1")
        for row in rows:
            writer.write(row.tobytes())
        writer.close()
    return [folder / f"{shard}.array_record" for shard in range(3)], records


def test_array_record_runs_through_its_shards(shards):
    paths, records = shards
    source = pickle.loads(pickle.dumps(readers.array_record(paths[:2], decode)))
    assert len(source) == 7
    np.testing.assert_array_equal([source[i] for i in range(7)], records)
    with pytest.raises(IndexError):
        source[7]
    np.testing.assert_array_equal(readers.array_record(str(paths[1]), decode)[2], records[6])


def test_damaged_shards_are_named(shards, tmp_path):
    paths, _ = shards
    damaged = tmp_path / "damaged.array_record"
    whole = paths[0].read_bytes()
    for content in (whole[:-70000], b"", b"text" * 20000):
        damaged.write_bytes(content)
        assert f"{damaged}: " in message(readers.array_record, [paths[0], damaged], decode)
    assert "it has no records" in message(readers.array_record, paths, decode)
    assert "No such file" in message(readers.array_record, tmp_path / "none", decode)
    assert "no files" in message(readers.array_record, [], decode)


def test_a_damaged_record_is_named(shards, tmp_path):
    paths, records = shards
    content = bytearray(paths[0].read_bytes())
    content[content.index(records[2].tobytes()[:64]) + 100] ^= 1
    damaged = tmp_path / "damaged.array_record"
    damaged.write_bytes(content)
    source = readers.array_record([paths[1], damaged], decode)
    np.testing.assert_array_equal(source[4], records[1])
    assert f"{damaged}: record 2: " in message(source.__getitem__, 5)


def test_a_record_that_does_not_decode_is_named(shards):
    paths, _ = shards
    source = readers.array_record(paths[:2], lambda record: record.decode("ascii"))
    assert f"{paths[1]}: record 1: UnicodeDecodeError" in message(source.__getitem__, 5)


def test_readers_import_no_library_before_it_is_needed(command):
    code = "import sys; from haikutrain import pipeline, readers; print(sorted(sys.modules))"
    loaded = command("-c", code, cwd=pathlib.Path(__file__).parents[1]).stdout
    assert "'haikutrain.readers'" in loaded
    assert not any(f"'{name}'" in loaded for name in ("grain", "PIL", "array_record"))
