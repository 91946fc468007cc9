"""Random access to images and records in files, and errors that name the damaged one."""

import pickle
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


def test_the_order_is_not_that_of_the_file_system(tmp_path):
    names = [f"{name}/{i}.png" for i in RNG.permutation(10) for name in "cab"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    source = readers.image_folder(tmp_path)
    assert [source.path(i) for i in range(30)] == [str(tmp_path / name) for name in sorted(names)]


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
