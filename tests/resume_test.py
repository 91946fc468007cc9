"""Resume is exact: stopped or killed anywhere, on any devices, the log and the state go on."""

import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
import pytest

import haikutrain
from haikutrain import start as starts
from haikutrain.checkpoint import Checkpointer
from haikutrain.checkpoint_folder import Folder, list_steps

SPLITS = ("train", "test", "few")


def newest(workdir):
    """The newest checkpoint: its step, and its leaves by path."""
    checkpointer = Checkpointer(workdir / "checkpoints", read_only=True)
    step = checkpointer.latest_step()
    return step, checkpointer.read(step).state


def all_lines(workdir):
    """The lines of `metrics.jsonl` so far."""
    log = workdir / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def expected_ids(tiny, steps, batch_size, devices, parts=1):
    """The metric `ids` of each step: the mean over the batch of id times (place in its part + 1).

    A part is what one device sees at once; places count on from device to device.
    """
    dataset = haikutrain.ArrayDataset(tiny.arrays(), batch_size, seed=0)
    rows = batch_size // devices // parts
    places = np.arange(devices)[:, None, None] * rows + np.arange(rows)
    ids = [dataset.batch(s)["id"].reshape(devices, parts, rows) for s in range(steps)]
    return [float(np.mean(part * (places + 1))) for part in ids]


def test_order_of_the_examples_shows_each_of_50_once_an_epoch(tiny):
    dataset = haikutrain.ArrayDataset(tiny.arrays(), 16, seed=0)
    row = np.concatenate([dataset.batch(s)["id"] for s in range(10)])
    epochs = [row[:50], row[50:100], row[100:150]]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


# --- stopped ---------------------------------------------------------------------------------


class Case(NamedTuple):
    variant: str
    devices: int
    batch_size: int
    num_steps: int
    per_call: int
    periods: tuple[int, int, int]
    """Of the log, the evaluation and the checkpoints."""
    stops: tuple[int, ...]
    environment: Mapping[str, str] = types.MappingProxyType({})
    parts: int = 1
    others: tuple[str, ...] = ()


TYPED = {"JAX_ENABLE_CUSTOM_PRNG": "1"}
RBG = {"JAX_DEFAULT_PRNG_IMPL": "rbg"}
CLIP, EMA = "--config.grad_clip_norm=0.5", "--config.ema_decay=0.9"

# Together they meet each network, data protocol, kind of key, steps_per_call, accumulation,
# averaging and clipping with most of the others; dropout and noise are always on. Of 50 examples
# an edge between epochs lies inside batch 3 of 16 rows, behind batch 4 of 10 and batch 1 of 25.
CASES = [
    Case("mlp-arrays", 4, 16, 10, 1, (1, 4, 6), (3, 4), {}, 2, (CLIP, EMA)),
    Case("conv-arrays", 2, 10, 20, 5, (10, 5, 10), (5,), RBG, 1, (EMA,)),
    Case("conv-iterator", 4, 16, 20, 1, (4, 6, 6), (7,), TYPED, 2, (CLIP,)),
    Case("mlp-iterator", 1, 25, 24, 6, (12, 6, 12), (6,)),
    Case("mlp-grain", 4, 16, 24, 6, (12, 12, 24), (6,), TYPED | RBG, 2, (CLIP, EMA)),
    Case("conv-grain", 2, 10, 12, 1, (4, 5, 6), (5,), {}, 1, (CLIP,)),
]


@pytest.fixture
def start(main, configs):
    """Starts the run of a case, or goes on with it, as a process of its own."""

    def run(case, workdir, *more):
        fields = {
            "num_steps": case.num_steps,
            "batch_size": case.batch_size,
            "steps_per_call": case.per_call,
            "accumulate_steps": case.parts,
            **dict(zip(("log_every", "eval_every", "checkpoint_every"), case.periods, strict=True)),
        }
        return main(
            f"--config={configs}/tiny.py:{case.variant}",
            f"--workdir={workdir}",
            f"--cpu_devices={case.devices}",
            *(f"--config.{name}={value}" for name, value in fields.items()),
            *case.others,
            *more,
            env=os.environ | case.environment,
        )

    return run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.variant)
def test_run_stopped_and_resumed_by_new_processes_is_the_straight_one(
    case, start, log_lines, tiny, tmp_path
):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    with concurrent.futures.ThreadPoolExecutor() as beside:
        whole = beside.submit(start, case, straight)
        for step in case.stops:
            start(case, stopped, f"--config.stop_after={step}")
            assert newest(stopped)[0] == step
        start(case, stopped)
        whole.result()

    log_every, eval_every, _ = case.periods
    logged, evaluated = (
        sorted({*range(period, case.num_steps + 1, period), case.num_steps})
        for period in (log_every, eval_every)
    )
    for split, steps in zip(SPLITS, (logged, evaluated, evaluated), strict=True):
        lines = log_lines(straight, split)
        assert [line["step"] for line in lines] == steps
        assert log_lines(stopped, split) == lines
    if log_every == 1:
        seen = [line["ids"] for line in log_lines(stopped)]
        assert seen == expected_ids(tiny, case.num_steps, case.batch_size, case.devices, case.parts)
    (step, state), (_, resumed) = newest(straight), newest(stopped)
    assert step == case.num_steps
    assert haikutrain.digest(resumed) == haikutrain.digest(state)
    rng = Folder(straight / "checkpoints", step).leaves()["rng"]
    assert rng.shape == ((4,) if "JAX_DEFAULT_PRNG_IMPL" in case.environment else (2,))
    assert (rng.key_impl is not None) == ("JAX_ENABLE_CUSTOM_PRNG" in case.environment)


def test_steps_per_call_may_change_at_a_step_that_it_does_not_divide(tiny, log_lines, tmp_path):
    def train(workdir, steps_per_call, **fields):
        config = tiny.get_config("mlp-iterator")
        config.log_every = config.eval_every = 6
        config.steps_per_call = steps_per_call
        config.update(fields)
        return haikutrain.train(tiny.Tiny(config), tmp_path / workdir)

    train("straight", 1)
    train("once", 1, stop_after=7)
    shutil.copytree(tmp_path / "once", tmp_path / "twice")
    train("once", 6)  # 5 single steps, then 2 calls of 6.
    train("twice", 6, stop_after=18)
    train("twice", 6)
    for split in SPLITS:
        assert log_lines(tmp_path / "twice", split) == log_lines(tmp_path / "once", split)
    assert haikutrain.digest(newest(tmp_path / "twice")[1]) == haikutrain.digest(
        newest(tmp_path / "once")[1]
    )
    # Another program for the same steps: the same numbers, to rounding.
    for line, single in zip(
        log_lines(tmp_path / "once"), log_lines(tmp_path / "straight"), strict=True
    ):
        assert (line["step"], line["ids"]) == (single["step"], single["ids"])
        assert line["loss"] == pytest.approx(single["loss"], abs=1e-5)


# --- killed ----------------------------------------------------------------------------------


def run_until_killed(flags, workdir, *, hold_at, checkpoint):
    """Starts a run that waits after step `hold_at`, and kills it when `checkpoint` is committed."""
    argv = [sys.executable, "-m", "haikutrain.main", *flags, f"--config.hold_at={hold_at}"]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120

    def arrived():
        # The line of a step is written during the step after it.
        last = max((line["step"] for line in all_lines(workdir)), default=0)
        return last >= hold_at - 1 and checkpoint in list_steps(workdir / "checkpoints")

    try:
        while not arrived():
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline, "it did not get there"
            time.sleep(0.02)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL


def tensorboard_scalars(workdir):
    """What TensorBoard shows: for each tag its (step, value) pairs, without the speeds."""
    from tensorboard.backend.event_processing import event_accumulator

    directory = str(workdir / "tensorboard")
    reader = event_accumulator.EventAccumulator(directory, size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(event.step, event.value) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
        if not tag.endswith("_per_second")
    }


def test_log_of_a_run_killed_twice_has_each_step_of_each_split_once(
    main, configs, log_lines, tmp_path
):
    straight, killed = tmp_path / "straight", tmp_path / "killed"

    def flags(workdir):
        config = f"--config={configs}/tiny.py:mlp-iterator"
        return [config, f"--workdir={workdir}", "--cpu_devices=4", "--config.log_every=1"]

    main(*flags(straight))
    run_until_killed(flags(killed), killed, hold_at=17, checkpoint=12)
    assert [line["step"] for line in log_lines(killed)] == list(range(1, 17))
    assert [line["step"] for line in log_lines(killed, "few")] == [8, 16]
    run_until_killed(flags(killed), killed, hold_at=21, checkpoint=18)
    main(*flags(killed))

    assert [line["step"] for line in log_lines(killed)] == list(range(1, 25))
    assert [line["step"] for line in log_lines(killed, "few")] == [8, 16, 24]
    for split in SPLITS:
        assert log_lines(killed, split) == log_lines(straight, split)
    order = [
        [(line["step"], line["split"]) for line in all_lines(workdir)]
        for workdir in (killed, straight)
    ]
    assert order[0] == order[1]
    scalars = tensorboard_scalars(killed)
    assert [step for step, _ in scalars["train/ids"]] == list(range(1, 25))
    assert [step for step, _ in scalars["few/accuracy"]] == [8, 16, 24]
    assert scalars == tensorboard_scalars(straight)
    assert haikutrain.digest(newest(killed)[1]) == haikutrain.digest(newest(straight)[1])


# --- elsewhere -------------------------------------------------------------------------------


def test_run_goes_on_with_the_same_examples_on_4_devices_and_on_1_again(
    start, log_lines, tiny, tmp_path
):
    for devices, stop in [(1, 5), (4, 11), (1, 16)]:
        case = Case("mlp-arrays", devices, 16, 24, 1, (1, 8, 6), ())
        start(case, tmp_path, f"--config.stop_after={stop}")
        assert newest(tmp_path)[0] == stop
    lines = log_lines(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 17))
    # Without parts the place of a row is its place in the global batch, on any devices.
    assert expected_ids(tiny, 16, 16, 1) == expected_ids(tiny, 16, 16, 4)
    assert [line["ids"] for line in lines] == expected_ids(tiny, 16, 16, 1)


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory):
    """A run of 24 steps that was stopped at 10, with averages and data by iterator."""
    workdir = tmp_path_factory.mktemp("source")
    haikutrain.train(restored_experiment(tiny, stop_after=10), workdir)
    return workdir


def restored_experiment(tiny, **fields):
    config = tiny.get_config("mlp-iterator")
    config.ema_decay = 0.9
    config.update(fields)
    return tiny.Tiny(config)


def test_restore_from_all_goes_on_as_the_source_would_have(tiny, source, log_lines, tmp_path):
    straight, other = tmp_path / "straight", tmp_path / "other"
    haikutrain.train(restored_experiment(tiny), straight)
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    haikutrain.train(restored_experiment(tiny, restore_from=str(source)), other)
    assert haikutrain.digest(newest(other)[1]) == haikutrain.digest(newest(straight)[1])
    for split in SPLITS:
        # The line of step 12 is the mean over steps 9 to 12, 2 of them the source's.
        later = [line for line in log_lines(straight, split) if line["step"] > 10]
        assert later[0]["step"] in (12, 16)
        assert log_lines(other, split) == later
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before


def test_restore_from_weights_takes_only_params_and_network_state(tiny, source, tmp_path):
    step, saved = newest(source)
    assert step == 10
    experiment = restored_experiment(
        tiny, restore_from=f"{source}/checkpoints/10", restore_only="weights"
    )
    task = starts.Task(experiment)
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    begun = starts.restore_or_init(task, checkpointer)
    checkpointer.close()
    fresh = starts.Task(restored_experiment(tiny)).programs.init()
    state = begun.state
    assert (begun.step, int(state.step), begun.position, begun.window) == (0, 0, None, None)
    for field in ("params", "network_state"):
        values = getattr(state, field)
        own = {path: leaf for path, leaf in saved.items() if path.startswith(f"{field}/")}
        assert len(own) == len(jax.tree.leaves(values)) > 0
        assert haikutrain.digest({field: values}) == haikutrain.digest(own)
        assert haikutrain.digest({field: getattr(fresh, field)}) != haikutrain.digest(own)
    for field in ("opt_state", "rng"):
        expected = haikutrain.digest(getattr(fresh, field))
        assert haikutrain.digest(getattr(state, field)) == expected
    averages = {"params": state.params, "network_state": state.network_state}
    assert haikutrain.digest(state.extras) == haikutrain.digest({"ema": averages})


def test_restore_from_is_left_aside_once_the_run_has_a_checkpoint(tiny, source, tmp_path):
    def train(stop_after):
        fields = {"restore_from": str(source), "restore_only": "weights", "stop_after": stop_after}
        return haikutrain.train(restored_experiment(tiny, **fields), tmp_path)

    train(3)
    assert int(train(4).step) == 4
    assert [line["step"] for line in all_lines(tmp_path)] == [4]
    opened = Checkpointer(tmp_path / "checkpoints", read_only=True)
    # The warm-up counts from 0 again: after 2 of its steps the rate is at its peak.
    rates = [
        value
        for path, value in opened.read(3).state.items()
        if path.startswith("opt_state/") and path.endswith("learning_rate")
    ]
    assert [float(rate) for rate in rates] == [pytest.approx(0.05)]
