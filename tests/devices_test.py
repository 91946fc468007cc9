"""The door to the devices; and that 1, 2, 4 and 8 of them train the same."""

import concurrent.futures
import os
import shutil

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import haikutrain
from haikutrain import config_file, devices, inspect
from haikutrain.checkpoint import Checkpointer

COUNTS = (1, 2, 4, 8)
STEPS, MIDDLE = 12, 6


@pytest.fixture(scope="module")
def train(main, configs):
    """Trains all jobs (variant, devices, workdir) to `STEPS`, as many at a time as there are cores.

    Each saves and evaluates at `MIDDLE` and at the end, and logs every step.
    """

    def run(job):
        variant, count, workdir = job
        main(
            f"--config={configs}/tiny.py:{variant}",
            f"--cpu_devices={count}",
            f"--workdir={workdir}",
            f"--config.num_steps={STEPS}",
            "--config.log_every=1",
            f"--config.eval_every={MIDDLE}",
            f"--config.checkpoint_every={MIDDLE}",
        )

    def run_all(jobs):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(run, jobs))

    return run_all


@pytest.fixture(scope="module")
def straight(train, tmp_path_factory):
    """Workdirs of runs without a stop, by (variant, devices)."""
    folder = tmp_path_factory.mktemp("straight")
    runs = [("conv-exact", count) for count in COUNTS] + [("mlp-exact", 1), ("mlp-exact", 8)]
    workdirs = {run: folder / f"{run[0]}{run[1]}" for run in runs}
    train([(*run, workdir) for run, workdir in workdirs.items()])
    return workdirs


def assert_same_log(log_lines, got, wanted, first_step):
    """The same examples; losses, accuracies and evaluations within 1e-5."""
    for split in ("train", "test", "few"):
        lines = [
            [line for line in log_lines(workdir, split) if line["step"] >= first_step]
            for workdir in (got, wanted)
        ]
        steps = range(first_step, STEPS + 1) if split == "train" else (MIDDLE, STEPS)
        assert [line["step"] for line in lines[0]] == [s for s in steps if s >= first_step]
        for one, other in zip(*lines, strict=True):
            assert one.keys() == other.keys()
            assert one.get("ids") == other.get("ids")
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
            assert one["accuracy"] == pytest.approx(other["accuracy"], abs=1e-6)


@pytest.mark.parametrize(
    "variant, count",
    [("conv-exact", 2), ("conv-exact", 4), ("conv-exact", 8), ("mlp-exact", 8)],
)
def test_losses_evaluation_and_order_are_those_of_one_device(straight, log_lines, variant, count):
    one, many = straight[variant, 1], straight[variant, count]
    assert_same_log(log_lines, many, one, first_step=1)
    lines = log_lines(one)
    assert len({line["ids"] for line in lines}) == STEPS  # Each step saw other examples.
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1


def leaf_table(path, capsys):
    """The rows of `inspect`'s tree: path, dtype and shape, and bytes of each leaf."""
    assert inspect.main([str(path)]) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    return [row for row in rows if len(row) > 2 and "/" in row[0] and "[" in row[1]]


def test_a_checkpoint_does_not_know_how_many_devices_wrote_it(straight, capsys):
    tables = [leaf_table(straight["conv-exact", count], capsys) for count in COUNTS]
    assert ["params/conv2_d/w", "float32[3,3,1,4]", "144", "B"] in tables[0]
    assert ["opt_state/0/trace/linear/b", "float32[3]", "12", "B"] in tables[0]
    for table in tables[1:]:
        assert table == tables[0]
    sizes = [
        {
            name: array.nbytes
            for name, array in Checkpointer(
                straight["conv-exact", count] / "checkpoints", read_only=True
            )
            .read(STEPS)
            .state.items()
        }
        for count in COUNTS
    ]
    assert sizes[0]["step"] == 4
    assert sizes[0]["rng"] == 8
    for other in sizes[1:]:
        assert other == sizes[0]


def test_a_checkpoint_of_any_count_resumes_on_any_other(straight, train, log_lines, tmp_path):
    pairs = [(1, 8), (8, 2), (4, 1), (2, 4)]
    jobs = []
    for writer, reader in pairs:
        workdir = tmp_path / f"{writer}to{reader}"
        shutil.copytree(straight["conv-exact", writer], workdir)
        shutil.rmtree(workdir / "checkpoints" / str(STEPS))
        jobs.append(("conv-exact", reader, workdir))
    train(jobs)
    for writer, reader in pairs:
        resumed = tmp_path / f"{writer}to{reader}"
        assert (resumed / "checkpoints" / str(STEPS)).is_dir()
        assert_same_log(log_lines, resumed, straight["conv-exact", writer], MIDDLE + 1)


def test_where_nothing_rounds_the_bytes_on_disk_are_equal(main, digest, configs, tmp_path):
    path = f"{configs}/dyadic.py"
    main(f"--config={path}", "--cpu_devices=1", f"--workdir={tmp_path}/1")
    loaded = config_file.load(path, [])
    haikutrain.train(loaded.experiment_class(loaded.config), tmp_path / "4")
    digests = []
    for step in (1, 2, 3):
        one, four = (
            Checkpointer(tmp_path / count / "checkpoints", read_only=True).read(step)
            for count in ("1", "4")
        )
        assert (one.meta["devices"], four.meta["devices"]) == (1, 4)
        for name, array in one.state.items():
            np.testing.assert_array_equal(four.state[name], array, err_msg=name)
        digests.append(haikutrain.digest(four.state))
        assert digests[-1] == haikutrain.digest(one.state)
    assert len(set(digests)) == 3
    assert np.all(four.state["params/~/w"] != 0)
    assert digest(tmp_path / "1") == digests[-1]


# --- the door --------------------------------------------------------------------------------


def test_simulate_replaces_flags_and_widens_the_thread_pool(command):
    """16 threads at least: with fewer than the devices need, XLA:CPU deadlocks."""
    code = (
        "import os; from haikutrain import devices; devices.simulate(3); import jax;"
        "print(jax.device_count(), jax.default_backend(), os.environ['PJRT_NPROC'])"
    )
    env = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    assert command("-c", code, env=env).stdout.split() == ["3", "cpu", "16"]


@pytest.mark.parametrize(
    "count, message", [(0, "--cpu_devices=0: .* must be >= 1"), (2, "JAX has already started")]
)
def test_simulate_refuses_what_it_cannot_do(count, message):
    assert jax.device_count() == 4
    with pytest.raises(haikutrain.UsageError, match=message):
        devices.simulate(count)
    assert jax.device_count() == 4


def aligned(*shape):
    """Zeros at an address that XLA:CPU would take over without a copy."""
    size = int(np.prod(shape)) * 4
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(np.float32).reshape(shape)


def test_place_replicates_strong_types_and_keeps_keys():
    tree = {
        "python": 3,
        "weak": jnp.asarray(2.0) * 1.0,
        "half": np.ones(3, jnp.bfloat16),
        "key": jax.random.key(7, impl="rbg"),
        "raw": jax.random.PRNGKey(7),
    }
    placed = devices.place(tree)
    assert haikutrain.digest(placed) == haikutrain.digest(tree)
    assert jax.random.key_impl(placed["key"]) == "rbg"
    for leaf in jax.tree.leaves(placed):
        assert len(leaf.sharding.device_set) == 4
        assert leaf.is_fully_replicated
        assert not leaf.aval.weak_type


def test_place_never_shares_memory_with_what_it_was_given():
    array, on_device = aligned(64, 64), jnp.full(5, 3.0)
    placed = devices.place({"numpy": array, "twice": array, "jax": on_device})
    again = devices.place(placed)
    array[:] = 7
    donate = devices.Program(
        lambda tree, _: jax.tree.map(lambda x: x + 1, tree),
        (placed, devices.place_batch(np.zeros(4))),
        in_axes=(None, 0),
        donate=(0,),
    )
    after = donate(placed, devices.place_batch(np.zeros(4)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(placed))
    np.testing.assert_array_equal(after["numpy"], np.ones((64, 64)))
    np.testing.assert_array_equal(after["twice"], np.ones((64, 64)))
    np.testing.assert_array_equal(again["numpy"], np.zeros((64, 64)))
    np.testing.assert_array_equal(again["jax"], np.full(5, 3.0))
    np.testing.assert_array_equal(on_device, np.full(5, 3.0))


def test_place_batch_gives_each_device_its_rows():
    rows = np.arange(24).reshape(8, 3)
    placed = devices.place_batch({"x": rows})["x"]
    stacked = devices.place_batch(np.stack([rows, rows + 100]), stacked=True)
    assert placed.shape == (4, 2, 3)
    assert stacked.shape == (2, 4, 2, 3)
    for device, shard in enumerate(placed.addressable_shards):
        assert shard.device == jax.local_devices()[device]
        np.testing.assert_array_equal(shard.data[0], rows[2 * device : 2 * device + 2])
    for device, shard in enumerate(stacked.addressable_shards):
        own = rows[2 * device : 2 * device + 2]
        np.testing.assert_array_equal(shard.data[:, 0], [own, own + 100])


def test_a_snapshot_survives_the_donation_of_its_original():
    state = devices.place({"a": np.arange(5000, dtype=np.float32), "key": jax.random.key(3)})
    before = haikutrain.digest(state)
    batch = devices.place_batch(np.zeros(4))
    program = devices.Program(
        lambda s, _: {"a": s["a"] + 1, "key": jax.random.fold_in(s["key"], 1)},
        (state, batch),
        in_axes=(None, 0),
        donate=(0,),
    )
    for _ in range(3):
        copy = devices.snapshot(state)
        assert {leaf.device for leaf in jax.tree.leaves(copy)} == {jax.local_devices()[0]}
        state = program(state, batch)
    np.testing.assert_array_equal(copy["a"], np.arange(5000) + 2)
    np.testing.assert_array_equal(state["a"], np.arange(5000) + 3)
    assert haikutrain.digest(copy) != before


def test_the_host_runs_ahead_by_no_more_than_the_limit():
    waited = []

    class Result:
        def __init__(self, number):
            self.number = number

        def block_until_ready(self):
            waited.append(self.number)

    ahead = devices.RunAhead(limit=3)
    for number in range(10):
        ahead.add(Result(number))
        assert waited == list(range(max(0, number + 1 - 3)))


def test_a_program_is_traced_when_made_and_never_again():
    calls = []

    def function(state, batch):
        calls.append(state.shape)
        return state + lax.psum(batch.sum(), haikutrain.AXIS)

    state, batch = devices.place(np.zeros((2, 3), np.float32)), devices.place_batch(np.ones(8))
    program = devices.Program(function, (state, batch), in_axes=(None, 0))
    assert calls == [(2, 3)]
    assert program.output.shape == (2, 3)  # No device axis.
    for _ in range(3):
        state = program(state, batch)
    np.testing.assert_array_equal(state, np.full((2, 3), 24.0))
    assert calls == [(2, 3)]
    with pytest.raises(TypeError, match=r"float32\[2,3\] and called with float32\[2,4\]"):
        program(devices.place(np.zeros((2, 4), np.float32)), batch)


@pytest.mark.parametrize("layer, loops", [("conv", 0), ("linear", 1)])
def test_scan_is_a_loop_unless_it_holds_convolutions_on_cpu(layer, loops):
    traced = []

    def forward(x):
        if layer == "conv":
            return hk.Conv2D(2, 3)(x[..., None]).mean()
        return hk.Linear(2)(x).mean()

    network = hk.without_apply_rng(hk.transform(forward))
    xs = np.random.default_rng(0).normal(size=(3, 2, 4, 4)).astype(np.float32)
    params = network.init(jax.random.key(0), xs[0])

    def body(params, x):
        traced.append(x.shape)
        loss, grads = jax.value_and_grad(network.apply)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    scan = jax.jit(lambda params, xs: devices.scan(body, params, xs, 3))
    lowered = scan.lower(params, xs)
    assert traced == [(2, 4, 4)]
    assert lowered.as_text().count("stablehlo.while") == loops
    got = lowered.compile()(params, xs)
    wanted = params, []
    for x in xs:
        new, loss = body(wanted[0], x)
        wanted = new, [*wanted[1], loss]
    np.testing.assert_allclose(got[1], wanted[1], atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got[0], wanted[0])
