"""`--mode=check` from outside; what it says of sound experiments; and what it must not accuse."""

import os
import pathlib
import random
import re
import shlex
import signal
import subprocess
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest

import haikutrain
from haikutrain import (
    check,
    check_data,
    check_replicas,
    check_trace,
    check_update,
    command_line,
    config_file,
)
from haikutrain.check_devices import DEVICES
from haikutrain.check_runs import Request, Runs
from haikutrain.check_table import BROKEN, table
from haikutrain.start import Task

ROOT = pathlib.Path(__file__).parents[1]
BROKEN_FILES = pathlib.Path(__file__).parent / "broken"


# --- the command -----------------------------------------------------------------------------


@pytest.fixture
def checked(main, tmp_path, monkeypatch):
    """Runs `--mode=check`; returns its code and {promise: (result, the rest of its row)}."""
    for name in ("tmp", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), *sys.path])))

    def run(file, *flags):
        here = tmp_path / "here"
        done = main(f"--config={file}", "--mode=check", *flags, check=False, cwd=here)
        assert list(here.iterdir()) == []  # Not even the workdir is there.
        assert list((tmp_path / "tmp").iterdir()) == []
        return done.returncode, rows_of(done.stdout), done

    return run


def rows_of(text):
    """The table read back: {promise: (result, where and what to do)}."""
    rows = []
    for line in text.splitlines()[3:-2]:
        what, result, rest = line[:34].strip(), line[36:47].strip(), line[49:].strip()
        if result:
            rows.append([what, result, rest])
        elif rows:
            rows[-1][0] = f"{rows[-1][0]} {what}".strip()
            rows[-1][2] = f"{rows[-1][2]} {rest}".strip()
    return {what: (result, rest) for what, result, rest in rows}


def test_a_sound_experiment_holds_and_leaves_nothing_behind(checked):
    code, rows, done = checked(BROKEN_FILES / "sound.py", "--workdir=run")
    assert code == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "16 held, 0 broken, 0 not checked"
    page = (ROOT / "docs/check.md").read_text()
    explained = set(re.findall(r"^\| ([^|]+) \|", page, re.M))
    assert {re.sub("of . cpu", "of N", what) for what in rows} <= explained
    said = {what: rest for what, (_, rest) in rows.items()}
    assert said["params can be trained"] == "30 float32 in 5 leaves"  # 3*4 + 4 + 4 + 4*2 + 2.
    assert said["stop, new process, go on: bit-exact"].startswith("3 steps, then to 6:")
    assert said["other devices, the same losses"].startswith("4 steps on 1 and 2 devices")
    # 30 params, 2 averages of 2 * 4 and a counter each, Adam's 2 * 30 and count; step and key.
    size = 4 * (30 + 2 * 9 + 61) + 4 + 8
    assert said["a checkpoint"].startswith(f"{size} B, 3 are kept: 1.34 kB")
    assert "3 checkpoints" in said["time of the whole run"]  # 12 steps, one every 4.
    memory, flops = re.search(
        r"([\d.]+) kB of memory.*; ([\d.e+]+) FLOPs", " ".join(done.stdout.split())
    ).groups()
    assert 0.5 < float(memory) < 50
    assert 500 < float(flops) < 50000


def test_the_page_gives_flags_that_there_are():
    page = (ROOT / "docs/check.md").read_text()
    (line,) = re.findall(r"```sh\n(.*)\n```", page)
    assert command_line.parse(shlex.split(line)[2:]).mode == "check"


def test_several_steps_a_call_local_norms_and_dropout_on_four_devices(checked, configs):
    flags = ("--config.steps_per_call=2", "--config.dropout=0.3", "--cpu_devices=4")
    code, rows, done = checked(f"{configs / 'tiny.py'}:iterator", *flags)
    assert code == 0, done.stdout + done.stderr
    result, rest = rows["other devices, the same losses"]
    assert result == "held"
    assert "on 1 and 4 devices" in rest
    assert "BatchNorm by the rows of each device in batch_norm" in rest
    assert "random numbers in tiny.py:" in rest
    assert rows["stop, new process, go on: bit-exact"][1].startswith("6 steps, then to 12:")
    assert rows["each example comes once an epoch"][1].startswith("id: 50 different ones")


def test_what_another_process_does_otherwise_is_accused(checked):
    code, rows, done = checked(BROKEN_FILES / "host_random.py")
    assert code == 2, done.stdout + done.stderr
    accused = {what: rest for what, (result, rest) in rows.items() if result == BROKEN}
    pure, resume = "the update is a pure function", "stop, new process, go on: bit-exact"
    assert set(accused) == {pure, resume}
    assert "np.random" in accused[pure]
    assert re.search(r"network_state/.* differs .*randomness of the host", accused[resume])
    assert rows["other devices, the same losses"][0] == "not checked"


OTHER_DEVICES = {
    "device_statistic": "loss of step 1 is .* on 1 and 4 devices; .* statistic of a device's own",
    "order_by_devices": "batch 0 has other rows.*1 and 4 devices; .* from the seed and the step",
}


@pytest.mark.parametrize("kind", OTHER_DEVICES)
def test_what_depends_on_the_devices_is_accused(kind, tmp_path):
    request = Request(str(BROKEN_FILES / f"{kind}.py"), (), None)
    loaded = config_file.load(request.config)
    single = loaded.config.copy_and_resolve_references()
    single.num_steps = 1  # Nothing to stop and resume: no commands.
    runs = Runs(request, single, tmp_path)
    rows = list(check.check_experiment(loaded.experiment_class(loaded.config), request, runs))
    (row,) = (row for row in rows if row.result == BROKEN)
    assert row.what == DEVICES
    assert re.search(OTHER_DEVICES[kind], f"{row.where}; {row.do}")


def test_a_mistake_is_one_line_as_ever(checked):
    code, rows, done = checked(
        BROKEN_FILES / "sound.py", "--config.batch_size=7", "--cpu_devices=2"
    )
    assert (code, rows, done.stdout) == (2, {}, "")
    progress, error = done.stderr.splitlines()  # The first command says it; no more is tried.
    assert progress.startswith("check: running the command")
    assert error.startswith("haikutrain: error: config.batch_size=7: the 2 devices share")


def test_a_signal_ends_the_commands_and_removes_the_folder(tmp_path):
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "haikutrain.main", "--mode=check"]
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(
        [*command, f"--config={BROKEN_FILES / 'sound.py'}"],
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    ) as process:
        assert "running the command" in process.stderr.readline()
        children = wait_for(lambda: running_in(tmp_path))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 42
    assert children
    assert running_in(tmp_path) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def running_in(folder):
    """The processes whose command line names the folder."""
    found = []
    for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [file] if str(folder) in file.read_text() else []
        except OSError:
            continue
    return found


def wait_for(condition):
    for _ in range(2000):
        if value := condition():
            return value
        signal.sigtimedwait([], 0.01)
    raise AssertionError("it did not come true in 20 s")


# --- sound experiments are not accused -------------------------------------------------------


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(rng.choice(["an", "bee", "can", "do"]) for _ in range(300))[:703])
    return path


@pytest.fixture(scope="module")
def flax_files(tmp_path_factory):
    page = (ROOT / "docs/without_haiku.md").read_text()
    folder = tmp_path_factory.mktemp("page")
    sources = re.findall(r"```python\n(.*?)```", page, re.S)
    for name, source in zip(("linen", "nnx"), sources, strict=True):
        (folder / f"{name}.py").write_text(source)
    return folder


SMALL_TEXT = "context=16 width=16 layers=1 heads=2 batch_size=8 sample_length=20"
SMALL_BYOL = "channels=(4,8) hidden=8 projection=4 batch_size=16"
SOUND = {
    "digits_resnet.py": "channels=(4,8) batch_size=16",
    "cifar_resnet.py:digits": "width=4 num_epochs=4 ema_decay=0.9 eval_every=89",
    "char_lm.py": SMALL_TEXT,
    "char_lm.py:float16": SMALL_TEXT,
    "byol.py": SMALL_BYOL,
    "byol.py:linear": "channels=(4,8) batch_size=16",
    "gan.py": "channels=8 latents=4 batch_size=16",
    "linen.py": "",
    "nnx.py": "",
    "tiny.py:grain": "",
}


@pytest.mark.parametrize("name", SOUND)
def test_no_sound_experiment_is_accused(name, text_file, flax_files, configs):
    fields = SOUND[name].split()
    if "char_lm" in name:
        fields.append(f"text_file={text_file}")
    folders = {"tiny.py:grain": configs, "linen.py": flax_files, "nnx.py": flax_files}
    folder = folders.get(name, ROOT / "experiments")
    loaded = config_file.load(f"{folder / name}", [f"--config.{field}" for field in fields])
    experiment = loaded.experiment_class(loaded.config)
    rows = [*check.Looked(experiment).rows(), *check_data.data_rows(experiment)]
    assert not [row for row in rows if row.result == BROKEN], table(rows)
    said = {row.what: row.where for row in rows}
    if name == "byol.py:linear":
        assert "declared frozen: params/encoder/" in said[check_update.GRADIENTS]
        assert "stays as it is" in said[check_update.STATE]
    if name in ("gan.py", "byol.py", "char_lm.py", "linen.py", "nnx.py"):
        assert f"drawn in {name}:" in said[check_replicas.RANDOM]


@pytest.fixture(scope="module")
def sound():
    """The class of `broken/sound.py`, and a function that makes its config with some changes."""
    loaded = config_file.load(str(BROKEN_FILES / "sound.py"))

    def config(**changes):
        made = config_file.load(str(BROKEN_FILES / "sound.py")).config
        made.update(changes)
        return made

    return loaded.experiment_class, config


def results(experiment):
    rows = list(check.Looked(experiment).rows())
    assert not [row for row in rows if row.result == BROKEN], table(rows)
    return {row.what: (row.result, row.where) for row in rows}


def test_a_branch_that_begins_at_0_behind_a_warm_up_is_not_accused(sound):
    kind, config = sound

    class Branch(kind):
        def hidden(self, batch, is_training):
            x = super().hidden(batch, is_training)
            y = jnp.tanh(hk.Linear(4, name="inner")(x))
            return x + hk.Linear(4, w_init=jnp.zeros, name="last")(y)

        def optimizer(self):
            return optax.sgd(optax.linear_schedule(0.0, 0.1, 10))

    # The rate is 0 in step 1; `last` moves in step 2; `inner` has a gradient from step 3 on.
    assert "not 0 in some of 4 steps" in results(Branch(config()))[check_update.GRADIENTS][1]


def test_a_layer_that_is_declared_frozen_is_not_accused(sound):
    kind, config = sound

    class Frozen(kind):
        def hidden(self, batch, is_training):
            return jax.lax.stop_gradient(super().hidden(batch, is_training))

        def optimizer(self):
            frozen = haikutrain.mask_by_name("linear/.*|batch_norm/.*")
            return haikutrain.freeze(super().optimizer(), frozen)

    result, where = results(Frozen(config()))[check_update.GRADIENTS]
    assert result == "held"
    assert where.endswith(
        "declared frozen: params/batch_norm/offset, params/batch_norm/scale, params/linear/w"
    )


def test_parts_of_a_batch_count_and_have_keys_of_their_own(sound):
    kind, config = sound
    said = results(kind(config(batch_size=16, accumulate_steps=2, dropout=0.5)))
    assert said[check_replicas.RANDOM][1].startswith("drawn in sound.py:")
    assert "another loss on each device" in said[check_replicas.RANDOM][1]
    assert said[check_update.STATE] == ("held", "all 6 leaves change with the steps")


def test_a_norm_that_is_called_twice_counts_by_two_and_is_not_accused(sound):
    kind, config = sound

    class Twice(kind):
        def hidden(self, batch, is_training):
            x = hk.Linear(4, with_bias=False)(batch["x"])
            norm = hk.BatchNorm(True, True, 0.9, cross_replica_axis=haikutrain.AXIS)
            return jnp.tanh(norm(x, is_training) + norm(jnp.abs(x), is_training))

    assert results(Twice(config()))[check_update.STATE] == (
        "held",
        "all 6 leaves change with the steps",
    )


def test_an_optimizer_inside_of_a_loop_is_judged_by_what_it_changes(sound):
    kind, config = sound

    class Inside(kind):
        def update(self, state, batch, rngs):
            grads, network_state, metrics = self.gradients(state, batch, rngs)
            grads, network_state, metrics = haikutrain.pmean((grads, network_state, metrics))

            def step(carry, _):
                params, opt_state = carry
                changes, opt_state = self.optimizer().update(grads, opt_state, params)
                return (optax.apply_updates(params, changes), opt_state), None

            carry, _ = jax.lax.scan(step, (state.params, state.opt_state), None, length=2)
            params, opt_state = carry
            new = {"params": params, "opt_state": opt_state, "network_state": network_state}
            return state.replace(**new), metrics

    result, where = results(Inside(config()))[check_update.GRADIENTS]
    assert result == "held"
    assert where.startswith("gradients cannot be seen")
    assert where.endswith("every param changes in the first 4 steps")


def test_draws_are_followed_through_loops_and_branches(sound):
    kind, config = sound

    class Loops(kind):
        def update(self, state, batch, rngs):
            state, metrics = super().update(state, batch, rngs)
            key, device = next(rngs), jax.lax.axis_index(haikutrain.AXIS)

            def body(count, _):
                return count + 1, jax.random.normal(jax.random.fold_in(key, count))

            _, each = jax.lax.scan(body, state.step, None, length=3)  # A key of both.

            def of_device(_, carry):  # Of the device, from the second turn on.
                key, x = carry
                return jax.random.fold_in(key, device), x + draw(key) + 0.0 * state.step

            _, looped = jax.lax.fori_loop(0, 3, of_device, (jax.random.key(0), 0.0))
            stepped = jax.random.fold_in(jax.random.key(1), state.step)  # Of the step alone.
            branch = jax.lax.cond(state.step > 0, draw, zero, stepped)
            return state, {**metrics, "drawn": each.sum() + looped + branch}

    def draw(key):
        return jax.random.uniform(key)

    def zero(key):
        return 0.0

    experiment = Loops(config())
    task = Task(experiment)
    draws = check_trace.trace_update(experiment, task.programs.state, task.feed.first).draws
    found = sorted((draw.differs_by_device, draw.differs_by_step) for draw in draws)
    assert found == [(False, True), (True, False), (True, True)]


def test_updates_that_come_once_in_several_steps_are_left_open(sound):
    kind, config = sound

    class Rare(kind):
        def optimizer(self):
            return optax.MultiSteps(super().optimizer(), 50)

    result, where = results(Rare(config()))[check_update.CHANGES]
    assert (result, "MultiSteps" in where) == ("not checked", True)
