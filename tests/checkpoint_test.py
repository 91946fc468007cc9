"""Checkpoints: what is saved is what was, and nothing else is ever restored."""

import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haikutrain.checkpoint as checkpoint_lib
from haikutrain.checkpoint import Checkpointer, digest, find_checkpoint
from haikutrain.errors import CheckpointDamaged, UsageError
from haikutrain.train_state import TrainState

ROOT = pathlib.Path(__file__).parent.parent


class PairState(TrainState):
    """A state with a field of its own."""

    target: dict


def make_params(scale=1.0):
    return {
        "res_net/~/conv_1": {"w": scale * jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(4)},
        "linear": {"w": scale * jnp.linspace(-1, 1, 8).reshape(4, 2)},
    }


def make_state(scale=1.0, optimizer=None, **changes):
    params = make_params(scale)
    opt_state = (optimizer or optax.adam(1e-2)).init(params)
    state = TrainState(
        params=params,
        network_state={"bn": {"counter": jnp.int32(7), "mean": jnp.full(4, 0.5)}},
        opt_state=opt_state,
        step=jnp.int32(5),
        rng=jax.random.PRNGKey(3),
        extras={},
    )
    return state.replace(**changes)


def save_one(directory, state, step=5, data=None, **kwargs):
    checkpointer = Checkpointer(directory)
    try:
        checkpointer.save(step, state, meta={"ended": False}, data=data, **kwargs)
    finally:
        checkpointer.close()


def restore_one(directory, target, step=5, **kwargs):
    return Checkpointer(directory, read_only=True).restore(step, target, **kwargs)


def assert_same(restored, state):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert digest(restored) == digest(state)
    for got, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape


def test_asynchronous_saves_every_step_equal_a_synchronous_reference(tmp_path):
    optimizer = optax.adam(1e-1)

    @jax.jit
    def update(state):
        grads = jax.tree.map(jnp.sin, state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1)

    donating = jax.jit(update, donate_argnums=0)
    copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
    state = make_state(optimizer=optimizer, step=jnp.int32(0))
    reference = {0: digest(state)}
    straight = state
    for step in range(1, 11):
        straight = update(straight)
        reference[step] = digest(jax.device_get(straight))
    checkpointer = Checkpointer(tmp_path, keep=20)
    state = copy(state)
    for step in range(1, 11):
        state = donating(state)
        checkpointer.save(step, copy(state), meta={}, data=None)
    checkpointer.close()
    assert checkpointer.steps() == list(range(1, 11))
    target = jax.eval_shape(lambda: state)
    for step in range(1, 11):
        assert digest(restore_one(tmp_path, target, step).state) == reference[step]
    assert len(set(reference.values())) == 11


def label(params):
    return {name: "a" if "conv" in name else "b" for name in params}


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.1),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(0.1, 0.0, 10))
    ),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "masked": lambda: optax.masked(
        optax.adam(0.1), lambda params: {name: "conv" in name for name in params}
    ),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 10)
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, label
    ),
    "set_to_zero": optax.set_to_zero,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_round_trip_with_their_types(tmp_path, name):
    optimizer = OPTIMIZERS[name]()

    @jax.jit
    def update(params, opt_state):
        grads = jax.tree.map(jnp.cos, params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = make_state(optimizer=optimizer)
    params, opt_state = update(state.params, state.opt_state)
    state = state.replace(params=params, opt_state=opt_state)
    save_one(tmp_path, state)
    target = jax.eval_shape(lambda: make_state(optimizer=optimizer))
    restored = restore_one(tmp_path, target).state
    assert_same(restored, state)
    assert digest(update(restored.params, restored.opt_state)) == digest(update(params, opt_state))


def test_every_kind_of_leaf_comes_back_as_it_was(tmp_path):
    extras = {
        "bfloat16": jnp.arange(5, dtype=jnp.bfloat16) / 3,
        "float16": jnp.float16(0.1),
        "int8": jnp.arange(-3, 3, dtype=jnp.int8),
        "uint32": jnp.uint32(4_000_000_000),
        "bool": jnp.array([True, False]),
        "complex64": jnp.complex64(1 - 2j),
        "nonfinite": jnp.array([jnp.nan, jnp.inf, -jnp.inf, -0.0]),
        "float64": np.array([0.1]),
        "int64": np.int64(2**60),
        "python": 3,
        "fortran": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "no_rows": jnp.zeros((0, 3)),
        "key": jax.random.key(1),
        "keys": jax.random.split(jax.random.key(2, impl="rbg"), 3),
        "none": None,
        "deep": [({}, ()), {"x": [jnp.float32(1)]}],
    }
    state = make_state(extras=extras)
    save_one(tmp_path, state)
    restored = restore_one(tmp_path, state.replace(extras=jax.tree.map(lambda x: x, extras))).state
    assert digest(restored) == digest(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for name in ("bfloat16", "complex64", "float64", "int64", "no_rows"):
        assert restored.extras[name].dtype == np.asarray(extras[name]).dtype
        assert isinstance(restored.extras[name], np.ndarray)
    assert restored.extras["python"].dtype == np.int32
    assert restored.extras["no_rows"].shape == (0, 3)
    assert restored.extras["key"].dtype == extras["key"].dtype
    assert restored.extras["keys"].dtype == extras["keys"].dtype
    assert (jax.random.bits(restored.extras["keys"][2]) == jax.random.bits(extras["keys"][2])).all()


def test_restored_leaves_have_memory_of_their_own(tmp_path):
    state = make_state()
    save_one(tmp_path, state)
    first = restore_one(tmp_path, state).state
    first.params["linear"]["w"][:] = 9.0
    assert digest(restore_one(tmp_path, state).state) == digest(state)


def test_empty_fields_have_no_item_and_come_back(tmp_path):
    state = make_state(network_state={}, optimizer=optax.sgd(0.1), extras={"z": jnp.zeros((0,))})
    save_one(tmp_path, state)
    assert not (tmp_path / "5" / "opt_state").exists()
    restored = restore_one(tmp_path, jax.eval_shape(lambda: state))
    assert_same(restored.state, state)
    assert restored.meta["empty"] == ["network_state", "opt_state", "extras"]


def test_a_subclass_saves_its_own_field(tmp_path):
    base = make_state()
    state = PairState(**vars(base), target=make_params(2.0))
    save_one(tmp_path, state)
    assert_same(restore_one(tmp_path, jax.eval_shape(lambda: state)).state, state)
    with pytest.raises(UsageError, match=r"target/linear/w \(float32\[4,2\] in the checkp"):
        restore_one(tmp_path, base)


def test_meta_and_position_come_back_equal(tmp_path):
    position = {"next": (3, 2**70), "rng": np.arange(4, dtype=np.uint64), "raw": b"\x00\xff"}
    meta = {"window": {"loss": math.nan, "best": -math.inf, "exact": 0.1}, "ids": [1, 2]}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(5, make_state(), meta=meta, data=position, metrics={"acc": 0.25})
    meta["ids"].append(3)
    position["rng"][:] = 0
    checkpointer.close()
    restored = restore_one(tmp_path, make_state())
    assert math.isnan(restored.meta["window"]["loss"])
    assert restored.meta["window"]["best"] == -math.inf
    assert restored.meta["window"]["exact"] == 0.1
    assert restored.meta["ids"] == [1, 2]
    assert (restored.meta["step"], restored.meta["format"]) == (5, 1)
    assert restored.meta["metrics"] == {"acc": 0.25}
    assert restored.meta["versions"]["jax"] == jax.__version__
    assert restored.data["next"] == (3, 2**70)
    assert restored.data["raw"] == b"\x00\xff"
    np.testing.assert_array_equal(restored.data["rng"], np.arange(4, dtype=np.uint64))
    with pytest.raises(ValueError, match="step"):
        checkpoint_lib.make_items(1, make_state(), {}, meta={"step": 1}, data=None, metrics={})


def test_all_differences_are_named_at_once(tmp_path):
    state = make_state()
    save_one(tmp_path, state)
    params = make_params()
    params["linear"] = {"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}
    del params["res_net/~/conv_1"]["b"]
    other = state.replace(params=params, step=jnp.float32(0), rng=jax.random.key(0))
    with pytest.raises(UsageError) as caught:
        restore_one(tmp_path, other)
    for part in (
        "params/linear/w is float32[4,2] in the checkpoint and float32[4,3] in the experiment",
        "params/linear/b (float32[3] in the experiment) is not in the checkpoint",
        "params/res_net/~/conv_1/b (float32[4] in the checkpoint) is not in the experiment",
        "step is int32[] in the checkpoint and float32[] in the experiment",
        "rng is uint32[2] in the checkpoint and key<threefry2x32>[] in the experiment",
    ):
        assert part in str(caught.value)
    assert str(caught.value).count("; ") == 4
    assert "\n" not in str(caught.value)


def test_another_kind_of_key_is_a_difference(tmp_path):
    save_one(tmp_path, make_state(rng=jax.random.key(0)))
    with pytest.raises(UsageError, match=r"rng is key<threefry2x32>\[\] .* key<rbg>\[\]"):
        restore_one(tmp_path, make_state(rng=jax.random.key(0, impl="rbg")))
    with pytest.raises(UsageError, match=r"rng is key<threefry2x32>\[\] .* uint32\[2\]"):
        restore_one(tmp_path, make_state(rng=jax.random.PRNGKey(0)))


def test_some_fields_only(tmp_path):
    saved = make_state(scale=3.0)
    save_one(tmp_path, saved)
    fresh = make_state(optimizer=optax.sgd(0.5), step=jnp.int32(0))
    restored = restore_one(tmp_path, fresh, fields=("params", "network_state")).state
    assert digest(restored.params) == digest(saved.params)
    assert digest(restored.network_state) == digest(saved.network_state)
    assert int(restored.step) == 0
    assert restored.opt_state == fresh.opt_state
    with pytest.raises(UsageError, match="opt_state/0/count"):
        restore_one(tmp_path, fresh)


@pytest.mark.parametrize(
    "values, mode, kept",
    [
        ([0.1, 0.9, 0.2, 0.3, 0.4, 0.5], "max", [2, 5, 6]),
        ([0.1, 0.9, 0.2, 0.3, 0.4, 0.5], "min", [1, 5, 6]),
        ([math.nan, 0.2, 0.1, None, 0.0, math.nan], "max", [2, 5, 6]),
        ([None] * 6, "max", [5, 6]),
        ([0.5, 0.5, 0.1, 0.1, 0.1, 0.1], "max", [2, 5, 6]),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, values, mode, kept):
    state = make_state()
    checkpointer = Checkpointer(tmp_path, keep=2, best_metric="acc", best_mode=mode)
    for step, value in enumerate(values, 1):
        metrics = None if value is None else {"acc": value, "other": 1.0}
        checkpointer.save(step, state, meta={}, data=None, metrics=metrics)
    checkpointer.close()
    assert checkpointer.steps() == kept
    assert checkpointer.latest_step() == 6
    assert checkpointer.best_step() == (kept[0] if len(kept) == 3 else None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(step) for step in kept]
    reopened = Checkpointer(tmp_path, keep=2, best_metric="acc", best_mode=mode)
    reopened.save(7, state, meta={}, data=None)
    reopened.close()
    assert reopened.steps() == [*kept[:-2], 6, 7]


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(bytes(content))


def test_a_flipped_bit_is_damage_and_never_wrong_values(tmp_path):
    state = make_state(extras={"ema": jnp.linspace(0, 1, 7)})
    save_one(tmp_path / "good", state, data={"next": 12345})
    target = jax.eval_shape(lambda: state)
    files = [
        path.relative_to(tmp_path / "good")
        for path in sorted((tmp_path / "good" / "5").rglob("*"))
        if path.is_file() and path.name != "commit_success.txt" and path.stat().st_size
    ]
    rng = np.random.default_rng(0)
    errors = []
    for name in files:
        bad = tmp_path / "bad"
        shutil.copytree(tmp_path / "good", bad)
        flip(bad / name, int(rng.integers(8 * (bad / name).stat().st_size)))
        restored = None
        try:
            restored = restore_one(bad, target)
        except CheckpointDamaged as error:
            errors.append(str(error))
        if restored is not None:  # A file, or a part of one, that does not matter.
            assert digest(restored.state) == digest(state)
            assert restored.data == {"next": 12345}
            assert restored.meta["ended"] is False
        shutil.rmtree(bad)
    assert len(errors) >= 5  # Of some forty files, a third matter in every bit.
    assert all(f"{bad / '5'} is damaged: item " in error for error in errors)
    assert not any("\n" in error for error in errors)


# Long enough for Orbax to store it as it is, and not inside a compressed index.
MARK = np.arange(4096, dtype=np.uint16)


@pytest.mark.parametrize(
    "item, text, leaf",
    [
        ("params", MARK.tobytes(), "params/linear/w"),
        ("network_state", MARK.tobytes(), "network_state/linear/w"),
        ("opt_state", MARK.tobytes(), "opt_state/0/linear/w"),
        ("extras", MARK.tobytes(), "extras/linear/w"),
        ("step", MARK.tobytes(), "step"),
        ("rng", MARK.tobytes(), "rng"),
        ("meta", b"false", ""),
        ("meta", b"ended", ""),  # Still JSON, of another name.
        ("data", b"2345", ""),  # Still JSON, of another value.
        ("checksums", b"uint16", ""),
        ("checksums", b"threefry2x32", ""),
        ("checksums", b"linear", ""),
    ],
)
def test_a_flipped_value_names_item_and_leaf(tmp_path, item, text, leaf):
    tree = {"linear": {"w": MARK.copy()}}
    target = TrainState(
        params=tree, network_state=tree, opt_state=(tree,), extras=tree, step=MARK, rng=MARK
    )
    target.extras["key"] = jax.random.key(0)
    save_one(tmp_path, target, data={"next": 12345})
    # Orbax may keep one value in two files.
    paths = [path for path in (tmp_path / "5" / item).rglob("*") if path.is_file()]
    paths = [path for path in paths if text in path.read_bytes()]
    assert paths
    for path in paths:
        flip(path, 8 * path.read_bytes().index(text))
    with pytest.raises(CheckpointDamaged, match=rf"5 is damaged: item {item}: .*{leaf}"):
        restore_one(tmp_path, target)


@pytest.mark.parametrize("item", ["params", "step", "meta", "data", "checksums"])
def test_missing_and_truncated_items_are_damage(tmp_path, item):
    state = make_state()
    save_one(tmp_path, state)
    largest = max(
        (path for path in (tmp_path / "5" / item).rglob("[!c]*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(CheckpointDamaged, match=f"item {item}"):
        restore_one(tmp_path, state)
    shutil.rmtree(tmp_path / "5" / item)
    with pytest.raises(CheckpointDamaged, match=f"item {item}"):
        restore_one(tmp_path, state)
    assert Checkpointer(tmp_path, read_only=True).steps() == [5]


def test_a_step_is_saved_once_and_in_order(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(5, make_state(), meta={}, data=None)
    for step in (5, 4):
        with pytest.raises(RuntimeError, match=f"cannot save step {step}: .* already has 5"):
            checkpointer.save(step, make_state(), meta={}, data=None)
    checkpointer.close()
    with pytest.raises(UsageError, match="no checkpoint of step 6; it has: 5"):
        checkpointer.restore(6, make_state())
    with pytest.raises(RuntimeError, match="closed"):
        checkpointer.save(7, make_state(), meta={}, data=None)


def test_stray_files_are_no_checkpoints_and_leftovers_go(tmp_path):
    save_one(tmp_path, make_state())
    (tmp_path / "9").mkdir()
    (tmp_path / "007").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    leftovers = [tmp_path / ".trash" / "3", tmp_path / "8.orbax-checkpoint-tmp-1"]
    for path in leftovers:
        (path / "params").mkdir(parents=True)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    reader = Checkpointer(tmp_path, read_only=True)
    assert reader.steps() == [5]
    assert digest(reader.read(5).state) == digest(make_state())
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    with pytest.raises(RuntimeError, match="read-only"):
        reader.save(6, make_state(), meta={}, data=None)
    writer = Checkpointer(tmp_path, keep=1)
    assert writer.latest_step() == 5
    assert not any(path.exists() for path in leftovers)
    with pytest.raises(FileExistsError, match="9 is in the way"):
        writer.save(9, make_state(), meta={}, data=None)
    writer.save(10, make_state(), meta={}, data=None)
    writer.close()
    assert writer.steps() == [10]
    assert {path.name for path in tmp_path.iterdir()} == {"9", "007", "notes.txt", "10"}


def test_a_failed_save_is_raised_once_and_the_next_succeeds(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, make_state(), meta={}, data=None)
    checkpointer.wait()
    original = checkpoint_lib.make_checksums

    def fail(*args):
        del args
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint_lib, "make_checksums", fail)
    checkpointer.save(2, make_state(), meta={}, data=None)
    with pytest.raises(OSError, match="no space left"):
        checkpointer.wait()
    checkpointer.wait()
    monkeypatch.setattr(checkpoint_lib, "make_checksums", original)
    # In Orbax's own writing, too: no folder can have this name.
    name = "n" * 250
    kind = type("Long", (TrainState,), {"__annotations__": {name: np.ndarray}})
    long = kind(params={}, network_state={}, opt_state={}, **{name: np.zeros(3)})
    checkpointer.save(3, long, meta={}, data=None)
    with pytest.raises(OSError, match="too long"):
        checkpointer.save(4, make_state(), meta={}, data=None)
    checkpointer.save(4, make_state(), meta={}, data=None)
    checkpointer.close()
    checkpointer.close()
    assert checkpointer.steps() == [1, 4]
    assert {path.name for path in tmp_path.iterdir()} == {"1", "4"}


def test_close_raises_what_the_last_save_failed_with(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(f"no space left for {len(args)} things")

    monkeypatch.setattr(checkpoint_lib, "make_checksums", fail)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, make_state(), meta={}, data=None)
    with pytest.raises(OSError, match="no space left"):
        checkpointer.close()
    checkpointer.close()
    assert list(tmp_path.iterdir()) == []


def test_save_returns_before_the_commit_and_waits_for_the_one_before(tmp_path, monkeypatch):
    go = threading.Event()
    original = checkpoint_lib.make_checksums

    def slow(*args):
        assert go.wait(60)
        return original(*args)

    monkeypatch.setattr(checkpoint_lib, "make_checksums", slow)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, make_state(), meta={}, data=None)
    assert checkpointer.steps() == []
    threading.Timer(0.2, go.set).start()
    checkpointer.save(2, make_state(), meta={}, data=None)
    assert checkpointer.steps()[0] == 1
    checkpointer.close()
    assert checkpointer.steps() == [1, 2]


SCRIPT = """
import sys, jax.numpy as jnp
from haikutrain.checkpoint import Checkpointer
from haikutrain.train_state import TrainState
checkpointer = Checkpointer(sys.argv[1])
try:
    for step in (1, 2):
        state = TrainState(params={"w": jnp.ones((200, 1000))}, network_state={}, opt_state={})
        checkpointer.save(step, state, meta={}, data=None)
    {leave}
finally:
    checkpointer.close()
"""


@pytest.mark.parametrize("leave, code", [("sys.exit(7)", 7), ("1 / 0", 1)])
def test_leaving_by_an_error_commits_the_save_in_flight(tmp_path, leave, code):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{leave}", leave), "here"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == code, run.stderr
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["1", "2"]
    arrays = Checkpointer(tmp_path / "here", read_only=True).read(2).state
    assert float(arrays["params/w"].sum()) == 200_000


@pytest.mark.parametrize("name", ["run [1]", "what?", "a*b"])
def test_a_directory_that_orbax_would_take_for_a_pattern_is_refused_to_writers(tmp_path, name):
    with pytest.raises(UsageError, match="use a path without"):
        Checkpointer(tmp_path / name)
    save_one(tmp_path / "good", make_state())
    (tmp_path / "good").rename(tmp_path / name)
    assert_same(restore_one(tmp_path / name, make_state()).state, make_state())


def test_a_relative_directory_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer("run/checkpoints")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    checkpointer.save(1, make_state(), meta={}, data=None)
    checkpointer.close()
    assert find_checkpoint(tmp_path / "run") == (tmp_path / "run" / "checkpoints", None)


def test_three_lines_of_plain_orbax_read_the_params(tmp_path):
    state = make_state()
    save_one(tmp_path, state)
    path = tmp_path / "5"
    import orbax.checkpoint as ocp

    params = ocp.PyTreeCheckpointer().restore(path / "params")
    assert set(params) == {"res_net/~/conv_1", "linear"}
    np.testing.assert_array_equal(params["linear"]["w"], state.params["linear"]["w"])
    assert digest(params) == digest(state.params)


def test_find_checkpoint_takes_workdir_directory_or_step(tmp_path):
    save_one(tmp_path / "checkpoints", make_state())
    directory = tmp_path / "checkpoints"
    assert find_checkpoint(tmp_path) == (directory, None)
    assert find_checkpoint(str(directory)) == (directory, None)
    assert find_checkpoint(directory / "5") == (directory, 5)
    for wrong in (directory / "6", directory / "5" / "params", tmp_path / "absent"):
        with pytest.raises(UsageError, match="holds no checkpoint"):
            find_checkpoint(wrong)


def test_what_cannot_be_saved_is_refused_at_once(tmp_path):
    checkpointer = Checkpointer(tmp_path)

    class Meta(TrainState):
        meta: dict

    for state, data, message in (
        (make_state(extras={"name": "resnet"}), None, "extras/name is a str"),
        (make_state(extras={"x": np.array(["a"])}), None, "extras/x is a ndarray of <U1"),
        (make_state(extras={"a/b": {"c": 1}, "a": {"b/c": 1}}), None, "extras/a/b/c"),
        (make_state(extras={"a.b": {"c": 1}, "a": {"b.c": 1}}), None, "extras.a.b.c"),
        (Meta(**vars(make_state()), meta={}), None, "'meta', a reserved name"),
        (make_state(), {"x": object()}, "position holds a builtins.object"),
    ):
        with pytest.raises(UsageError, match=message):
            checkpointer.save(1, state, meta={}, data=data)
    with pytest.raises(TypeError, match="float32"):
        checkpointer.save(1, make_state(), meta={"x": np.float32(1)}, data=None)
    checkpointer.close()
    assert checkpointer.steps() == []
    with pytest.raises(UsageError, match="at least 1"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(UsageError, match="best_mode"):
        Checkpointer(tmp_path, best_mode="highest")


def test_array_data_is_not_compressed(tmp_path):
    save_one(tmp_path, make_state(extras={"w": jnp.ones(100_000)}))
    size = sum(p.stat().st_size for p in (tmp_path / "5" / "extras").rglob("*") if p.is_file())
    assert size > 400_000


def test_importing_and_listing_start_neither_orbax_nor_a_backend(tmp_path):
    save_one(tmp_path, make_state(), metrics={"acc": 0.5})
    script = (
        "import sys, json\n"
        "from haikutrain.checkpoint import Checkpointer\n"
        "from jax._src import xla_bridge\n"
        "reader = Checkpointer(sys.argv[1], read_only=True, best_metric='acc')\n"
        "found = [reader.steps(), reader.best_step(), 'orbax.checkpoint' in sys.modules]\n"
        "print(json.dumps([*found, xla_bridge.backends_are_initialized()]))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=env, capture_output=True, check=True
    )
    assert json.loads(out.stdout) == [[5], 5, False, False]
