"""What docs/data.md says is run, block after block, on small files of each kind."""

import gzip
import pathlib
import re
import struct
import sys
import types

import numpy as np
import pytest
from PIL import Image

from haikutrain.eval_feed import EvalFeed
from haikutrain.feed import TrainFeed

TEXT = (pathlib.Path(__file__).parents[1] / "docs/data.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
RNG = np.random.default_rng(0)


def bytes_of(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def write_files():
    """Every file that the page names, tiny, in the working directory."""
    from array_record.python.array_record_module import ArrayRecordWriter

    np.savez("my_data.npz", x=np.zeros((3, 2)))
    for folder in (
        "data/mnist",
        "photos/train/cat",
        "photos/train/dog",
        "photos/test/dog",
        "shards",
    ):
        pathlib.Path(folder).mkdir(parents=True)
    for name, array in (("images-idx3", bytes_of(5, 28, 28)), ("labels-idx1", bytes_of(5))):
        header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        path = pathlib.Path(f"data/mnist/train-{name}-ubyte.gz")
        path.write_bytes(gzip.compress(header + array.tobytes()))
    for i in range(1, 6):
        records = bytes_of(30, 3073)
        records[:, 0] %= 10
        pathlib.Path(f"data/data_batch_{i}.bin").write_bytes(records.tobytes())
    for i, folder in enumerate(["train/cat", "train/dog", "test/dog"] * 2):
        Image.fromarray(bytes_of(40 + i, 50, 3)).save(f"photos/{folder}/{i}.png")
    for shard in range(2):
        writer = ArrayRecordWriter(f"shards/{shard}.array_record", "group_size:1")
        for label in range(10):
            writer.write(bytes_of(64).tobytes() + bytes([label]))
        writer.close()


class Source:
    """What both libraries give: random access, by an int, to dicts of arrays and more."""

    def __init__(self, shape, extra):
        self.shape, self.extra = shape, extra

    def __len__(self):
        return 12

    def __getitem__(self, index):
        assert type(index) is int
        assert 0 <= index < 12
        return {
            "image": np.full(self.shape, index, np.uint8),
            "label": np.int64(index),
            **self.extra,
        }

    def with_format(self, kind):
        assert kind == "numpy"
        return self


def data_source(name, *, split, data_dir):
    assert (name, split, data_dir) == ("mnist", "train", "data")
    return Source((28, 28, 1), {"id": b"train_0"})


def load_from_disk(path):
    assert path == "data/mnist_hf"
    return {"train": Source((28, 28), {})}


@pytest.fixture(scope="module")
def scopes(tmp_path_factory):
    """The names that exist after each block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("data"))
        for name, function in (("tensorflow_datasets", data_source), ("datasets", load_from_disk)):
            module = types.ModuleType(name)
            setattr(module, function.__name__, function)
            patch.setitem(sys.modules, name, module)
        write_files()
        scope, after = {"__name__": "docs_data"}, []
        for block in BLOCKS:
            exec(block, scope)
            after.append(dict(scope))
        yield after


def after(scopes, words):
    """The names after the one block that has these words in it."""
    (index,) = [i for i, block in enumerate(BLOCKS) if words in block]
    return scopes[index]


def rows_of(dataset, batch_size):
    """The first training batch, as the loop sees it."""
    return TrainFeed(dataset, batch_size).first


def test_every_block_runs(scopes):
    assert len(scopes) == len(BLOCKS) == TEXT.count("```python") == 10


def test_arrays(scopes):
    scope = after(scopes, "np.zeros((100")
    assert rows_of(scope["train"], 32)["image"].shape == (32, 8, 8, 1)
    assert scope["test"].batch(3)["label"].shape == (4,)
    feed = TrainFeed(after(scopes, "on_device=True")["resident"], 32)
    with feed.items([(0, 1)], None) as items:
        assert next(items).arrays["label"].shape == (100,)


def test_files(scopes):
    scope = after(scopes, "read_cifar")
    assert scope["mnist"]["image"].shape == (5, 28, 28, 1)
    assert rows_of(scope["train"], 128)["image"].shape == (128, 32, 32, 3)
    assert len(after(scopes, "array_record(")["records"]) == 20


def test_photos_with_grain(scopes):
    scope = after(scopes, "class Crop")
    batch = rows_of(scope["train"], 8)
    assert (batch["image"].shape, batch["label"].dtype) == ((8, 32, 32, 3), np.int32)
    (item,) = EvalFeed(scope["test"], "test", 4).items()
    # Both are dogs, of label 1 in training.
    assert np.asarray(item.batch["label"])[np.asarray(item.mask)].tolist() == [1, 1]
    workers = after(scopes, "num_workers=8")["train"]
    assert (workers.batch_size, workers.num_workers) == (128, 8)


def test_a_filtered_stream(scopes):
    feed = TrainFeed(after(scopes, "to_iter_dataset")["stream"], 32)
    assert feed.first["label"].max() < 5
    assert feed.fingerprint()["protocol"] == "by iterator"


@pytest.mark.parametrize("library", ["tensorflow_datasets", "load_from_disk"])
def test_recipes_for_other_libraries(scopes, library):
    batch = rows_of(after(scopes, library)["train"], 12)
    assert batch["image"].shape == (12, 28, 28, 1)
    assert sorted(batch["label"]) == list(range(12))
    assert (batch["image"][:, 0, 0, 0] == batch["label"]).all()
    assert batch["label"].dtype == np.int32


def test_a_dataset_of_ones_own(scopes):
    dataset = after(scopes, "class Sines")["Sines"]()
    batch = rows_of(dataset, 64)
    np.testing.assert_allclose(batch["y"], np.sin(batch["x"]), atol=1e-6)
    np.testing.assert_array_equal(dataset.batch(0, slice(8, 16))["x"], batch["x"][8:16])
