"""train(), evaluate() and restore() from Python, what hooks see, and what is saved."""

import json

import jax
import numpy as np
import pytest

import haikutrain
from haikutrain import leaves
from haikutrain.checkpoint import Checkpointer


@pytest.fixture
def experiment(tiny):
    """Makes the tiny experiment with these config fields and hooks."""

    def make(variant="mlp", hooks=(), **fields):
        config = tiny.get_config(variant)
        config.num_steps, config.eval_every = 12, None
        config.update(fields)
        made = tiny.Tiny(config)
        made.hooks = lambda: hooks
        return made

    return make


def saved(workdir, step):
    """The leaves of a checkpoint by path."""
    return Checkpointer(workdir / "checkpoints", read_only=True).read(step).state


def steps(workdir):
    return Checkpointer(workdir / "checkpoints", read_only=True).steps()


def temporary(workdir):
    """What an unfinished save or deletion leaves."""
    names = ("*tmp*", ".trash")
    return [path for name in names for path in workdir.rglob(name)]


# --- as in a notebook ------------------------------------------------------------------------


def test_training_twice_in_one_process_resumes_and_equals_one_fresh_run(
    experiment, log_lines, tmp_path
):
    half = haikutrain.train(experiment(stop_after=5), tmp_path / "two")
    assert int(half.step) == 5
    last = haikutrain.train(experiment(), tmp_path / "two")
    fresh = haikutrain.train(experiment(), tmp_path / "one")
    assert int(last.step) == int(fresh.step) == 12
    assert haikutrain.digest(last) == haikutrain.digest(fresh) != haikutrain.digest(half)
    assert haikutrain.digest(saved(tmp_path / "two", 12)) == haikutrain.digest(fresh)
    for split in ("train", "test", "few"):
        lines = log_lines(tmp_path / "one", split)
        assert lines == log_lines(tmp_path / "two", split) != []


def test_restore_and_evaluate_give_what_training_gave(experiment, log_lines, tmp_path):
    trained = haikutrain.train(experiment(ema_decay=0.5), tmp_path)
    again = experiment(ema_decay=0.5)
    state = haikutrain.restore(again, tmp_path)
    assert type(state) is haikutrain.TrainState
    assert haikutrain.digest(state) == haikutrain.digest(trained)
    # On all devices, and no leaf has an axis of devices.
    assert state.params["linear"]["w"].shape == (16, 8)
    assert all(len(leaf.sharding.device_set) == 4 for leaf in jax.tree.leaves(state))
    earlier = haikutrain.restore(again, tmp_path, 6)
    assert int(earlier.step) == 6
    assert haikutrain.digest(earlier) == haikutrain.digest(saved(tmp_path, 6))

    results = haikutrain.evaluate(again, tmp_path)
    assert results == {
        split: {name: line[name] for name in ("accuracy", "loss")}
        for split in ("test", "few")
        for line in log_lines(tmp_path, split)
        if line["step"] == 12
    }
    assert haikutrain.evaluate(again, tmp_path, checkpoint=6) != results
    assert type(results["test"]["loss"]) is float


def test_evaluation_does_not_move_the_training(experiment, log_lines, tmp_path):
    often = haikutrain.train(experiment(eval_every=1), tmp_path / "often")
    never = haikutrain.train(experiment(), tmp_path / "never")
    assert [line["step"] for line in log_lines(tmp_path / "often", "few")] == list(range(1, 13))
    assert [line["step"] for line in log_lines(tmp_path / "never", "few")] == [12]
    assert haikutrain.digest(often) == haikutrain.digest(never)
    assert log_lines(tmp_path / "often") == log_lines(tmp_path / "never")


# --- hooks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "per_call, called, of_5",
    [(1, list(range(1, 13)), [5, 10]), (4, [4, 8, 12], [8, 12])],
)
def test_hooks_are_called_after_each_call_and_at_their_period(
    experiment, log_lines, tmp_path, per_call, called, of_5
):
    seen, periodic = [], []

    def look(info):
        assert int(info.state.step) == info.step
        assert info.num_steps == 12
        seen.append((info.step, info.metrics_step, dict(info.metrics), info.steps))
        assert (info.evaluations_step or 0) == info.step // 8 * 8

    hooks = [look, haikutrain.every(5, lambda info: periodic.append(info.step))]
    fields = {"steps_per_call": per_call, "checkpoint_every": 12, "eval_every": 8}
    haikutrain.train(experiment(hooks=hooks, **fields), tmp_path)
    assert [(step, count) for step, _, _, count in seen] == [(s, per_call) for s in called]
    assert periodic == of_5
    # The means of a window arrive with the call behind it, or at once where an evaluation follows.
    lines = {line["step"]: line for line in log_lines(tmp_path)}
    for step, metrics_step, metrics, _ in seen:
        arrived = [s for s in (4, 8) if s < step or s == step == 8]
        assert metrics_step == max(arrived, default=None)
        assert (
            metrics.keys() >= {"loss", "accuracy", "grad_norm", "steps_per_second"} or not arrived
        )
        assert all(
            metrics[name] == lines[metrics_step][name] for name in metrics if "_per_" not in name
        )
        assert all(type(value) is float for value in metrics.values())


def test_hook_sees_evaluations_and_stops_the_run(experiment, log_lines, tmp_path):
    def judge(info):
        assert info.evaluations.keys() == {"test", "few"}
        if info.evaluations["test"]["loss"] > 0 and info.step == 6:
            info.stop("low enough")

    made = experiment(hooks=[haikutrain.every(3, judge)], eval_every=3, checkpoint_every=5)
    state = haikutrain.train(made, tmp_path)
    assert int(state.step) == 6
    assert steps(tmp_path) == [5, 6]
    assert [line["step"] for line in log_lines(tmp_path)] == [4, 6]
    assert [line["step"] for line in log_lines(tmp_path, "test")] == [3, 6]
    assert haikutrain.digest(saved(tmp_path, 6)) == haikutrain.digest(state)
    meta = Checkpointer(tmp_path / "checkpoints", read_only=True).read_meta(6)
    assert meta["ended"] == "low enough"


# --- what is saved ---------------------------------------------------------------------------


@pytest.mark.parametrize("variant, per_call", [("mlp", 1), ("conv-iterator", 2)])
def test_each_asynchronous_save_is_the_state_of_its_step(experiment, tmp_path, variant, per_call):
    copies = {}

    def copy(info):
        # Leaf by leaf, in memory of its own, before the next step can begin.
        copies[info.step] = {
            path: np.array(leaf) for path, leaf in leaves.by_path(info.state).items()
        }

    fields = {"steps_per_call": per_call, "ema_decay": 0.9, "keep_checkpoints": 100}
    # In a run of its own: holding a view of a buffer keeps it from being donated.
    haikutrain.train(
        experiment(variant, hooks=[copy], checkpoint_every=12, **fields), tmp_path / "copied"
    )
    haikutrain.train(experiment(variant, checkpoint_every=per_call, **fields), tmp_path / "saved")
    assert steps(tmp_path / "saved") == sorted(copies) == list(range(per_call, 13, per_call))
    assert len({haikutrain.digest(copy) for copy in copies.values()}) == 12 // per_call
    for step, expected in copies.items():
        found = saved(tmp_path / "saved", step)
        assert found.keys() == expected.keys()
        for path, value in expected.items():
            assert found[path].dtype == value.dtype
            np.testing.assert_array_equal(found[path], value, err_msg=f"{path} at step {step}")
    assert temporary(tmp_path) == []


class OwnError(Exception):
    """Raised by a hook, or by the data."""


def test_checkpoint_is_committed_when_a_hook_or_the_data_fails_later(
    experiment, tiny, log_lines, tmp_path
):
    def fail(info):
        if info.step == 7:
            raise OwnError("at step 7")

    class Failing(tiny.CountingIterator):
        def __next__(self):
            if self.next_step == 7:
                raise OwnError("batch 7")
            return super().__next__()

    class Dataset(tiny.Counting):
        def __iter__(self):
            return Failing(self.dataset)

    reference = haikutrain.train(experiment(stop_after=6), tmp_path / "reference")
    by_hook = experiment(hooks=[fail], checkpoint_every=3)
    by_data = experiment("mlp-iterator", checkpoint_every=3)
    data = Dataset(haikutrain.ArrayDataset(tiny.arrays(), 16, seed=0))
    by_data.train_data = lambda: data
    for name, failing in (("hook", by_hook), ("data", by_data)):
        workdir = tmp_path / name
        with pytest.raises(OwnError):
            haikutrain.train(failing, workdir)
        assert steps(workdir) == [3, 6]
        assert haikutrain.digest(saved(workdir, 6)) == haikutrain.digest(reference)
        assert [line["step"] for line in log_lines(workdir)] == [4]
        assert temporary(workdir) == []
    # The same command goes on from there, once the mistake is mended.
    last = haikutrain.train(experiment(checkpoint_every=3), tmp_path / "hook")
    assert int(last.step) == 12
    text = (tmp_path / "hook" / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [4, 8, 12, 12, 12]
