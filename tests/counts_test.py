"""What the framework costs, counted: compilations, collectives, transfers, bytes on disk."""

import math
import pathlib
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.array import ArrayImpl

import haikutrain
from haikutrain import collectives, devices, metrics
from haikutrain.programs import Programs

DEVICES = 4


class Layers(haikutrain.Experiment):
    """Hidden layers with local BatchNorm; the first one of `config.width`, the others of 8."""

    def loss(self, batch, is_training):
        x = batch["x"]
        for i in range(self.config.layers):
            x = hk.Linear(8 if i else self.config.width, with_bias=False)(x)
            x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
        losses = hk.Linear(1)(x)[:, 0] ** 2
        return losses, {"positive": x.mean(axis=1) > 0}

    def optimizer(self):
        return optax.adam(1e-3)

    def train_data(self):
        x = np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)
        return haikutrain.ArrayDataset({"x": x}, self.config.batch_size, seed=0)


def layers(count=1, width=8, **fields):
    config = haikutrain.base_config()
    config.layers, config.width = count, width
    config.num_steps, config.batch_size, config.log_every = 40, 8, 10
    config.update(fields)
    return Layers(config)


# --- collectives ---------------------------------------------------------------------------------


def all_reduced(program):
    """The sizes of the operands of all all-reduces in a compiled program."""
    hlo = program._compiled().as_text()
    found = re.findall(r"= (.*?) all-reduce(?:-start)?\(", hlo)
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", " ".join(found))
    assert {dtype for dtype, _ in shapes} <= {"f32"}
    return sorted(math.prod(int(n) for n in shape.split(",") if n) for _, shape in shapes)


@pytest.mark.parametrize("count, group, large", [(2, 1, 0), (4, 16, 0), (2, 16, 1), (4, 1, 1)])
def test_an_update_reduces_gradients_float_state_and_metrics_once(count, group, large):
    """One operand for all, plus one for a leaf above the packing size, however many layers."""
    width = collectives._PACKED_BELOW // 16 if large else 8
    experiment = layers(count, width)
    made = Programs(experiment, experiment.train_data().batch(0))
    floats = [
        leaf.size
        for leaf in jax.tree.leaves((made.state.params, made.state.network_state))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    assert len(floats) == 3 * count + 2 + 4 * count
    averaged = sum(floats) + len({"loss", "positive"})
    sizes = all_reduced(made._update_program(1, group))
    assert len(sizes) == 1 + len([size for size in floats if size >= collectives._PACKED_BELOW])
    assert sum(sizes) == averaged


def test_one_device_reduces_nothing(command, tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
from haikutrain import devices
devices.simulate(1)
import counts_test
experiment = counts_test.layers(2)
made = counts_test.Programs(experiment, experiment.train_data().batch(0))
print(counts_test.all_reduced(made._update_program(1)))
"""
    assert command("-c", code).stdout.strip() == "[]"


# --- transfers -----------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """Trains; counts what crosses between host and devices from the second step to the last.

    Returns the sizes of the batches' transfers, and for each fetch the last step that hooks have
    seen and the size. Any other transfer to a device raises.
    """

    def run(experiment):
        placed, fetched, seen, open_ = [], {}, [0], []
        place, as_array, value = devices.place_batch, np.asarray, ArrayImpl._value

        def count_placed(batch, **kwargs):
            if open_:
                placed.append(sum(leaf.nbytes for leaf in jax.tree.leaves(batch)))
            with jax.transfer_guard_host_to_device("allow"):
                return place(batch, **kwargs)

        def note(array):
            # One array that is looked at twice is fetched once.
            if open_ and isinstance(array, jax.Array):
                fetched.setdefault(id(array), (seen[0], array.size, array))

        def noted(array, *args, **kwargs):
            note(array)
            return as_array(array, *args, **kwargs)

        def value_of(array):
            note(array)
            return value.fget(array)

        def watch(info):
            seen[0] = info.step
            if info.step == experiment.config.steps_per_call:
                open_.append(1)
                jax.config.update("jax_transfer_guard_host_to_device", "disallow_explicit")
            if info.step == experiment.config.num_steps - experiment.config.steps_per_call:
                open_.clear()
                jax.config.update("jax_transfer_guard_host_to_device", "allow")

        experiment.hooks = lambda: [watch]
        monkeypatch.setattr(devices, "place_batch", count_placed)
        monkeypatch.setattr(np, "asarray", noted)
        monkeypatch.setattr(ArrayImpl, "_value", property(value_of))
        try:
            haikutrain.train(experiment, tmp_path / "run")
        finally:
            jax.config.update("jax_transfer_guard_host_to_device", "allow")
        return placed, [(step, size) for step, size, _ in fetched.values()]

    return run


def window_size(experiment):
    names = Programs(experiment, experiment.train_data().batch(0)).metric_names
    return len(metrics.empty_window(names))


def test_only_batches_go_to_the_devices_and_one_vector_a_log_period_comes_back(counted):
    experiment = layers(num_steps=80)
    size = window_size(experiment)
    placed, fetched = counted(experiment)
    # 8 rows of 16 floats, 16 batches at a time; the first 16 were there before the counting.
    assert placed == [8 * 16 * 4 * 16] * 4
    # Closed at 10, 20, ... and fetched in the call after, before hooks have seen its step.
    assert fetched == [(step, size) for step in range(10, 71, 10)]


def test_the_same_with_several_steps_a_call(counted):
    experiment = layers(num_steps=80, steps_per_call=5)
    size = window_size(experiment)
    placed, fetched = counted(experiment)
    # Each call's batches are placed one call ahead.
    assert placed == [8 * 16 * 4 * 5] * 14
    assert fetched == [(step, size) for step in range(10, 71, 10)]


def test_another_transfer_is_seen(counted, monkeypatch):
    run = devices.Program.__call__

    def sloppy(self, state, sums, *rest):
        if rest:  # It is the update, not init.
            sums = jnp.asarray(np.asarray(sums))
        return run(self, state, sums, *rest)

    monkeypatch.setattr(devices.Program, "__call__", sloppy)
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        counted(layers())


# --- compilations --------------------------------------------------------------------------------


def test_a_longer_run_compiles_no_more(tmp_path):
    def compilations(name, steps):
        found = []

        def listen(event, duration, **_):
            found.extend([event] if event.endswith("backend_compile_duration") else [])

        experiment = layers(num_steps=steps, checkpoint_every=4, log_every=2)
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            haikutrain.train(experiment, tmp_path / name)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        return len(found)

    compilations("warm", 8)  # JAX's own small functions are compiled once a process.
    assert compilations("short", 8) == compilations("long", 40) <= 4


# --- disk ----------------------------------------------------------------------------------------


def test_a_checkpoint_is_as_large_as_the_state_once(tmp_path):
    """On four devices; every leaf and its metadata, the log's window, the checksums."""
    experiment = layers(1, 1 << 16, num_steps=2, log_every=1)
    state = haikutrain.train(experiment, tmp_path)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert held > 12e6
    folder = tmp_path / "checkpoints" / "2"
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert held <= written <= 1.01 * held
