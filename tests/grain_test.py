"""grain pipelines: one global order on any number of processes and workers, exact after a kill."""

import json
import os
import select
import signal
import subprocess
import sys

import grain
import numpy as np
import pytest

import haikutrain
from haikutrain import GrainDataset, config_file, pipeline
from haikutrain.errors import UsageError
from haikutrain.eval_feed import EvalFeed
from haikutrain.feed import TrainFeed

DEVICES = 4  # As many as the tests simulate.
EXAMPLES = 10


class Noise(grain.transforms.RandomMap):
    """Adds numbers that depend on the place in the global order, and says who made them."""

    def random_map(self, element, rng):
        return {"id": element, "noise": rng.integers(10**6, size=3), "pid": os.getpid()}


def endless(seed=1):
    dataset = grain.MapDataset.range(EXAMPLES).seed(seed).shuffle().repeat()
    return dataset.random_map(Noise())


def finite(examples=EXAMPLES):
    return grain.MapDataset.range(examples).map(lambda i: {"id": i, "x": np.full(2, i)})


def one_by_one(dataset, begin, end):
    """Elements begin to end - 1, stacked by hand, without who made them."""
    elements = [dataset[i] for i in range(begin, end)]
    return {name: np.stack([e[name] for e in elements]) for name in ("id", "noise")}


def assert_same(batch, expected):
    for name in ("id", "noise"):
        np.testing.assert_array_equal(batch[name], expected[name])


# --- which rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("batched", [False, True])
def test_batch_s_is_elements_sB_to_sB_plus_B_on_any_number_of_processes(processes, batched):
    dataset = GrainDataset(endless().batch(8) if batched else endless(), 8)
    size = 8 // processes
    for process in range(processes):
        rows = slice(process * size, (process + 1) * size)
        with_start = dataset.batches(2, rows)
        for step in range(5):
            expected = one_by_one(endless(), step * 8 + rows.start, step * 8 + rows.stop)
            assert_same(dataset.batch(step, rows), expected)
            if step >= 2:
                assert_same(next(with_start), expected)
        with_start.close()


def test_an_epoch_is_a_permutation_and_batches_straddle_epochs():
    stream = GrainDataset(endless(), 8).batches(0)
    ids = np.concatenate([next(stream)["id"] for _ in range(5)]).reshape(4, EXAMPLES)
    stream.close()
    assert [sorted(epoch) for epoch in ids.tolist()] == [list(range(EXAMPLES))] * 4
    assert len({tuple(epoch) for epoch in ids.tolist()}) == 4


def test_a_finite_dataset_ends_in_a_smaller_batch():
    for dataset in (GrainDataset(finite(), 4), GrainDataset(finite().batch(4), 4)):
        assert len(dataset) == 3
        ids = [batch["id"].tolist() for batch in dataset.batches(0)]
        assert ids == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        # Of four processes the last two have no rows of the last batch, but their shapes.
        shapes = [dataset.batch(2, slice(p, p + 1))["x"].shape for p in range(4)]
        assert shapes == [(1, 2)] * 2 + [(0, 2)] * 2
    with pytest.raises(TypeError, match="no end"):
        len(GrainDataset(endless(), 4))


# --- worker processes ----------------------------------------------------------------------------


def test_two_workers_make_what_one_process_makes_and_ignore_signals_until_closed():
    straight = GrainDataset(endless(), 8)
    stream = GrainDataset(endless(), 8, num_workers=2).batches(3, slice(2, 8))
    pids = set()
    for step in range(3, 12):
        batch = next(stream)
        assert_same(batch, straight.batch(step, slice(2, 8)))
        pids |= set(batch["pid"].tolist())
        if step == 3:
            for pid in pids:  # As Ctrl-C and a scheduler send them to every process.
                os.kill(pid, signal.SIGINT)
                os.kill(pid, signal.SIGTERM)
    assert len(pids) == 2
    assert os.getpid() not in pids
    watched = [os.pidfd_open(pid) for pid in pids]
    stream.close()
    assert_end(watched)


def assert_end(watched):
    """Waits until processes, given by their pidfd, have ended."""
    for descriptor in watched:
        assert select.select([descriptor], [], [], 60)[0], "a worker goes on"
        os.close(descriptor)


def test_the_workers_of_an_iterator_end_with_the_run():
    one = grain.MultiprocessingOptions(num_workers=1)
    feed = TrainFeed(endless().batch(8).to_iter_dataset().mp_prefetch(one), 8)
    (pid,) = set(feed.first["pid"].tolist())
    watched = [os.pidfd_open(pid)]
    with feed.items([(0, 1)], None) as items:
        np.testing.assert_array_equal(next(items).batch["id"].ravel(), feed.first["id"])
    assert_end(watched)


UNGUARDED = """
import grain, haikutrain
numbers = grain.MapDataset.range(8).map(lambda i: {"i": i})
print(next(haikutrain.GrainDataset(numbers, 4, num_workers=1).batches(0)))
"""


def test_a_script_without_a_guard_is_told_so(tmp_path, command):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = command(script, check=False)
    assert done.returncode == 1
    assert 'put if __name__ == "__main__": around' in done.stderr


class Broken(grain.transforms.Map):
    """Raises at element 9, and ends its process at element 40."""

    def map(self, element):
        if element == 40:
            os._exit(7)
        if element == 9:
            raise ArithmeticError("element 9 is no good")
        return {"id": element}


@pytest.mark.parametrize(
    "begin, error, words",
    [(0, ArithmeticError, "element 9 is no good"), (10, RuntimeError, "exit code 7")],
)
def test_what_goes_wrong_in_a_worker_is_raised(begin, error, words):
    dataset = grain.MapDataset.range(begin, 100).map(Broken())
    stream = GrainDataset(dataset, 4, num_workers=1).batches(0)
    assert next(stream)["id"].tolist() == list(range(begin, begin + 4))
    with pytest.raises(error, match=words):
        list(stream)


# --- the whole, as a command ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tmp_path_factory, main, configs):
    """A run without workers that nobody stopped."""
    workdir = tmp_path_factory.mktemp("straight")
    main(f"--config={configs}/grained.py", f"--workdir={workdir}", "--cpu_devices=2")
    return workdir


@pytest.mark.parametrize("form", ["workers", "iter"])
def test_killed_with_two_workers_a_run_resumes_bit_for_bit(
    form, straight, tmp_path, main, configs, log_lines, caplog
):
    workdir, pids = tmp_path / "run", tmp_path / "pids"
    pids.mkdir()
    flags = [f"--config={configs}/grained.py", f"--workdir={workdir}", "--cpu_devices=2"]
    flags += [f"--config.form={form}", f"--config.pids={pids}"]
    killed = subprocess.Popen(
        [sys.executable, "-m", "haikutrain.main", *flags, "--config.hold_at=13"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with killed:
        assert "held\n" in killed.stdout
        workers = {int(path.name) for path in pids.iterdir()} - {killed.pid}
        assert len(workers) == 2
        watched = [os.pidfd_open(pid) for pid in workers]
        killed.kill()
    assert_end(watched)
    assert len(log_lines(workdir)) < 20
    resumed = main(*flags)
    assert "Traceback" not in resumed.stderr  # Workers that nobody closes end noisily.
    assert log_lines(workdir) == log_lines(straight)
    assert [line["step"] for line in log_lines(workdir)] == list(range(1, 21))
    loaded = config_file.load(f"{configs}/grained.py")
    experiment = loaded.experiment_class(loaded.config)
    digests = {haikutrain.digest(haikutrain.restore(experiment, w)) for w in (workdir, straight)}
    assert len(digests) == 1
    # Another number of workers moves nothing but an iterator's position.
    overrides = [f"--config.form={form}", f"--config.pids={pids}", "--config.workers=0"]
    if form == "iter":
        with pytest.raises(UsageError, match="workers was 2 and is 0"):
            resume(configs, workdir, *overrides)
    else:
        resume(configs, workdir, *overrides)
        assert "worker processes of train_data: 2 -> 0" in caplog.text


def resume(configs, workdir, *overrides):
    loaded = config_file.load(f"{configs}/grained.py", overrides)
    return haikutrain.train(loaded.experiment_class(loaded.config), workdir)


def test_every_form_of_a_map_dataset_is_one_run(straight, tmp_path, configs, log_lines):
    resume(configs, tmp_path, "--config.form=batched", "--config.stop_after=7")
    resume(configs, tmp_path, "--config.form=workers", "--config.workers=0")
    ids = [(line["step"], line["ids"]) for line in log_lines(tmp_path)]
    assert ids == [(line["step"], line["ids"]) for line in log_lines(straight)]
    # 0 + 1 + ... + 49, each once, whatever the batch size and the devices.
    (evaluated,) = log_lines(tmp_path, "all")
    assert evaluated["id"] == 24.5


def test_another_seed_is_refused(tmp_path, configs):
    resume(configs, tmp_path, "--config.num_steps=2")
    with pytest.raises(UsageError, match=r"train_data has changed .*seed was \[3\] and is \[4\]"):
        resume(configs, tmp_path, "--config.data_seed=4")


def test_an_iter_dataset_is_refused_on_another_number_of_processes(tmp_path, configs, monkeypatch):
    fingerprint = TrainFeed.fingerprint
    form = "--config.form=iter", "--config.workers=0"
    with monkeypatch.context() as two:
        two.setattr(TrainFeed, "fingerprint", lambda self: {**fingerprint(self), "processes": 2})
        resume(configs, tmp_path, *form, "--config.num_steps=2")
    with pytest.raises(UsageError, match=r"processes was 2 and is 1.*grain\.MapDataset"):
        resume(configs, tmp_path, *form)


# --- as the loop sees it -------------------------------------------------------------------------


def test_a_bare_map_dataset_is_by_step():
    feed = TrainFeed(endless(), 8)
    with feed.items([(3, 1), (4, 2)], None) as items:
        single, double = items
    expected = one_by_one(endless(), 24, 48)["id"]
    np.testing.assert_array_equal(single.batch["id"], expected[:8].reshape(DEVICES, 2))
    np.testing.assert_array_equal(double.batch["id"], expected[8:].reshape(2, DEVICES, 2))
    assert (single.position, double.position) == (None, None)
    fingerprint = json.loads(json.dumps(feed.fingerprint()))
    assert fingerprint["protocol"] == "by step"
    assert (fingerprint["seed"], fingerprint["examples"]) == ([1], EXAMPLES)
    with pytest.raises(UsageError, match=r"has 2 batches and the run needs 3.*\.repeat\(\)"):
        TrainFeed(finite(), 8).check_length(3)


@pytest.mark.parametrize("batch_size", [3, 4, 16])
def test_evaluation_sees_each_example_once(batch_size):
    for dataset in (finite(), finite().batch(batch_size)):
        feed = EvalFeed(dataset, "test", batch_size)
        for _ in range(2):
            items = list(feed.items())
            masks = [np.asarray(item.mask) for item in items]
            ids = [np.asarray(item.batch["id"])[m] for item, m in zip(items, masks, strict=True)]
            assert np.concatenate(ids).tolist() == list(range(EXAMPLES))
    with pytest.raises(UsageError, match="no end"):
        EvalFeed(endless(), "test", batch_size)


# --- what is refused, and what is remembered -----------------------------------------------------


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: GrainDataset(endless().to_iter_dataset(), 8), "not a PrefetchIterDataset"),
        (lambda: GrainDataset([1, 2], 8), "not a list"),
        (lambda: GrainDataset(endless(), 0), "batch_size is 0"),
        (lambda: GrainDataset(endless(), 8, num_workers=-1), "num_workers -1"),
        (lambda: GrainDataset(finite().filter(lambda x: True), 8), r"\.to_iter_dataset\(\)\.batch"),
        (lambda: GrainDataset(finite(0), 8), "is empty"),
        (lambda: GrainDataset(endless().batch(4), 8), "batches of 4 and batch_size is 8"),
        (lambda: TrainFeed(endless().batch(4), 8), "batch_size 4 and the config 8"),
    ],
)
def test_what_cannot_be_cut_into_batches_is_refused_at_once(make, words):
    with pytest.raises(UsageError, match=words):
        make()


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda i: None if i == 5 else {"x": i}, "example 5 .*is None; map"),
        (lambda i: {"x": np.zeros((i // 6, 2))}, r"example 4 .*\[0, 2\].* 6 .*\[1, 2\]"),
        (lambda i: {"x": np.int8(1) if i < 7 else 1.0}, r"example 4 .*int8\[\].* 7 .*float64\[\]"),
        (lambda i: {"x": 1} if i < 6 else {"y": 1}, "example 4 .*'x'.* 6 .*'y'"),
        (lambda i: {"x": "cat"}, r"example 0 .*'x': '<U3\[\]'}; map"),
        (lambda i: {}, "example 0 .*{}; map"),
    ],
)
def test_examples_that_do_not_fit_together_are_named(change, words):
    dataset = GrainDataset(grain.MapDataset.range(8).map(change), 8)
    with pytest.raises(UsageError, match=words):
        # Two halves, as two processes would make them.
        [dataset.batch(0, slice(0, 4)), dataset.batch(0, slice(4, 8))]


def test_repeating_batches_leaves_a_small_one_in_every_epoch():
    dataset = GrainDataset(finite().batch(4).repeat(), 4)
    with pytest.raises(UsageError, match=r"batch 2 .*'id': 2.*\.repeat\(\)\.batch\(4\)"):
        list(zip(range(4), dataset.batches(0), strict=False))


def test_every_seed_and_the_workers_are_remembered():
    dataset = grain.MapDataset.range(9)
    noise = Noise()
    workers = grain.MultiprocessingOptions(num_workers=3)
    for seed, built in [
        ([4], dataset.seed(4).shuffle().random_map(noise)),
        ([4], dataset.shuffle(seed=4)),
        ([5, 4], dataset.seed(4).shuffle().random_map(noise, seed=5)),
        ([6, 4], dataset.seed(4).shuffle().repeat().seed(6).random_map(noise)),
        ([7], grain.experimental.WindowShuffleMapDataset(dataset, window_size=3, seed=7)),
        ([1, 2], grain.MapDataset.mix([dataset.shuffle(seed=1), dataset.shuffle(seed=2)])),
    ]:
        assert pipeline.describe(GrainDataset(built, 8))["seed"] == seed
        iterated = built.to_iter_dataset().mp_prefetch(workers)
        described = pipeline.describe(iterated)
        assert (described["seed"], described["workers"]) == (seed, 3)
        assert described["examples"] % 9 == 0
    assert pipeline.describe(dataset.to_iter_dataset().random_map(noise, seed=8))["seed"] == [8]
    assert pipeline.describe(haikutrain.ArrayDataset(np.arange(9), 3)) == {}


def test_dtypes_stay():
    example = {"a": np.uint8(1), "b": 2, "c": np.float16(3), "d": True}
    batch = GrainDataset(grain.MapDataset.source([example]), 1).batch(0)
    assert [str(leaf.dtype) for leaf in batch.values()] == ["uint8", "int64", "float16", "bool"]
