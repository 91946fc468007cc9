"""Jobs of several processes, by the real command: they begin, stop, die and go on together."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from haikutrain.workdir import Workdir

LOST = 75


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Started:
    """A job's processes, each with its output in a file."""

    def __init__(self, folder, commands, environments=None):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.processes = []
        for index, command in enumerate(commands):
            with (folder / f"out{index}").open("w") as out:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-u", "-m", "haikutrain.main", *map(str, command)],
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **(environments[index] if environments else {})},
                    )
                )

    def codes(self, timeout=120):
        """The exit codes of all, when all have ended."""
        deadline = time.monotonic() + timeout
        return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]

    def output(self, index=None):
        """What one or all have printed, without what the collectives' library says."""
        which = range(len(self.processes)) if index is None else [index]
        texts = [(self.folder / f"out{i}").read_text() for i in which]
        return "".join(line for t in texts for line in t.splitlines(True) if "[Gloo]" not in line)

    def wait_until(self, condition, timeout=90):
        deadline = time.monotonic() + timeout
        while not condition():
            assert all(p.poll() is None for p in self.processes), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)


@pytest.fixture
def start(tmp_path):
    """Starts jobs; ends what a failed test leaves behind."""
    jobs = []

    def run(commands, environments=None):
        jobs.append(Started(tmp_path / f"job{len(jobs)}", commands, environments))
        return jobs[-1]

    yield run
    for job in jobs:
        for process in job.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def commands(count, devices, *flags):
    """One command for each process of a job."""
    job = [f"--coordinator_address=127.0.0.1:{free_port()}", f"--num_processes={count}"]
    return [[f"--process_id={i}", f"--cpu_devices={devices}", *job, *flags] for i in range(count)]


@pytest.fixture(scope="module")
def straight(configs, tmp_path_factory, digest, log_lines):
    """The uninterrupted run of `configs/sharded.py` in two processes: its workdir, digest, log."""
    folder = tmp_path_factory.mktemp("straight")
    flags = [f"--config={configs / 'sharded.py'}", f"--workdir={folder / 'work'}"]
    job = Started(folder / "job", commands(2, 1, *flags))
    assert job.codes() == [0, 0], job.output()
    return folder / "work", digest(folder / "work"), log_lines(folder / "work")


# --- beginning -----------------------------------------------------------------------------------


def test_a_missing_process_is_named_in_time(start):
    address = f"--coordinator_address=127.0.0.1:{free_port()}"
    flags = ["--config=nothing.py", address, "--num_processes=4", "--init_timeout=2"]
    began = time.monotonic()
    job = start([[*flags, "--process_id=0"], [*flags, "--process_id=2"]])
    assert job.codes(30) == [2, 2]
    assert time.monotonic() - began < 15
    assert "processes 1, 3 of 4 did not come" in job.output(0)
    # Once in the job, unless the other one gave up first.
    for line in job.output(1).splitlines():
        assert re.match(r"haikutrain: error: processes? [13]", line)


def test_process_0_missing_is_said_in_time(start):
    address = f"--coordinator_address=127.0.0.1:{free_port()}"
    flags = ["--config=nothing.py", address, "--num_processes=2", "--init_timeout=2"]
    job = start([[*flags, "--process_id=1"]])
    assert job.codes(30) == [2]
    assert job.output().count("\n") == 1
    for part in ("process 1 did not reach process 0", address, "Connection refused"):
        assert part in job.output()


@pytest.mark.parametrize(
    "ids, counts, expected",
    [
        ((0, 1, 1), (3, 3, 3), "two processes of the job were started with --process_id=1"),
        ((0, 1), (3, 2), "started with --num_processes=2 and process 0 with 3"),
        ((0, 2), (2, 3), "started with --num_processes=3 and process 0 with 2"),
    ],
)
def test_processes_that_contradict_each_other_end_at_once(start, ids, counts, expected):
    address = f"--coordinator_address=127.0.0.1:{free_port()}"
    flags = ["--config=nothing.py", address, "--init_timeout=100"]
    pairs = zip(ids, counts, strict=True)
    job = start([[*flags, f"--process_id={i}", f"--num_processes={n}"] for i, n in pairs])
    assert set(job.codes(30)) == {2}
    assert expected in job.output(0)
    assert job.output(0).count("\n") == 1
    assert "Traceback" not in job.output()


def test_a_port_in_use_is_said(start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"--coordinator_address=127.0.0.1:{other.getsockname()[1]}"
        flags = ["--config=nothing.py", "--num_processes=2", "--init_timeout=3", address]
        job = start([[*flags, f"--process_id={i}"] for i in range(2)])
        assert job.codes(30) == [2, 2]
    assert "Address already in use" in job.output(0)
    assert "what listens there does not answer" in job.output(1)
    assert job.output().count("\n") == 2


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--jax_distributed=off", "--process_id=0"], "off contradicts --process_id=0"),
        (["--jax_distributed=on"], "needs --coordinator_address=HOST:PORT"),
        (["--num_processes=2", "--process_id=0"], "needs --coordinator_address=HOST:PORT"),
        (["--num_processes=2", "--process_id=2"], "from 0 to 1"),
        (["--process_id=-1"], "--process_id=-1"),
        (["--mode=check", "--num_processes=2"], "--mode=check runs in one process"),
        (["--mode=eval", "--follow", "--num_processes=2"], "--follow runs in one process"),
        (["--num_processes=0"], "--num_processes=0: it must be 1 or more"),
        (["--coordinator_address=here"], "write HOST:PORT"),
        (["--coordinator_address=here:0"], "write HOST:PORT"),
        (["--init_timeout=0"], "--init_timeout"),
    ],
)
def test_flags_that_contradict_are_refused(run_plain, check_refused, flags, expected):
    check_refused(run_plain(*flags), expected)


def test_on_or_off_one_process_is_one(run_plain):
    for flags in (["--jax_distributed=off"], ["--jax_distributed=on", "--num_processes=1"]):
        assert run_plain(*flags, "--config.num_steps=2")[0] == 0


def test_slurm_says_which_processes_there_are(start, configs, tmp_path, straight, digest):
    flags = ["--cpu_devices=1", f"--config={configs / 'sharded.py'}", "--init_timeout=60"]
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost"}
    slurm |= {"SLURM_NTASKS": "2"}
    environments = [{**slurm, "SLURM_PROCID": f"{i}", "SLURM_LOCALID": f"{i}"} for i in range(2)]
    job = start([[*flags, f"--workdir={tmp_path / 'work'}"]] * 2, environments)
    assert job.codes() == [0, 0], job.output()
    assert digest(tmp_path / "work") == straight[1]
    # Process 0 speaks for all.
    assert "on 2 cpu devices of 2 processes" in job.output(0)
    assert job.output(1) == ""


# --- training ------------------------------------------------------------------------------------


def test_positions_of_all_processes_are_saved(straight, command):
    shown = command("-m", "haikutrain.inspect", straight[0]).stdout
    position = "[{'process': 0, 'number': 30}, {'process': 1, 'number': 60}]"
    assert f"data position: {position}" in shown


def test_training_sees_the_rows_of_all_processes(straight, tiny_module):
    for line in straight[2]:
        step = line["step"]
        rows = [tiny_module.rows(process, step * (process + 1)) for process in range(2)]
        np.testing.assert_allclose(line["first"], np.mean(rows, axis=(0, 1))[0], rtol=1e-5)


def test_uneven_evaluation_data_give_exact_means(straight, tiny_module, log_lines):
    for split in ("uneven", "one"):
        parts = [b["x"] for process in range(2) for b in tiny_module.held_out(split, process)]
        expected = np.concatenate(parts)[:, 0].mean()
        lines = log_lines(straight[0], split)
        assert [line["step"] for line in lines] == [10, 20, 30]
        for line in lines:
            np.testing.assert_allclose(line["first"], expected, rtol=1e-6)


@pytest.fixture(scope="module")
def tiny_module(configs):
    """The module `configs/sharded.py`."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("sharded", configs / "sharded.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_evaluation_alone_gives_the_same_and_speaks_once(
    start, configs, straight, log_lines, tiny_module, tmp_path
):
    flags = [f"--config={configs / 'sharded.py'}", f"--workdir={straight[0]}", "--mode=eval"]
    job = start(commands(2, 1, *flags, f"--predictions={tmp_path / 'rows.npz'}"))
    assert job.codes() == [0, 0], job.output()
    last = log_lines(straight[0], "uneven")[-1]
    assert f"uneven loss {last['loss']:.6g}" in job.output(0).splitlines()
    assert job.output(1) == ""
    lines = (straight[0] / "metrics_eval.jsonl").read_text().splitlines()
    assert [json.loads(line)["split"] for line in lines] == ["uneven", "one"]
    # Each example once: a batch of process 0, one of process 1, the next of process 0, ...
    kept = np.load(tmp_path / "rows.npz")["uneven/kept"]
    first, second = (tiny_module.held_out("uneven", process) for process in range(2))
    parts = [first[0], second[0], first[1], first[2]]
    np.testing.assert_array_equal(kept, np.concatenate([part["x"][:, 0] for part in parts]))


def test_layouts_train_alike_and_resume_each_others_checkpoints(start, configs, tmp_path, main):
    """2x2, 4x1, 1x4, 1x1 (processes x devices) one after the other, against 1x4 alone."""
    flags = [f"--config={configs / 'tiny.py'}:exact", "--config.num_steps=8"]
    flags += ["--config.log_every=1", "--config.eval_every=8"]
    main("--cpu_devices=4", *flags, f"--workdir={tmp_path / 'alone'}")
    layouts = [(2, 2), (4, 1), (1, 4), (1, 1)]
    for turn, (count, devices) in enumerate(layouts, 1):
        stop = f"--config.stop_after={2 * turn}"
        job = start(commands(count, devices, *flags, stop, f"--workdir={tmp_path / 'work'}"))
        assert job.codes() == [0] * count, job.output()
    expected, found = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("alone", "work")
    )
    assert [(x["step"], x["split"]) for x in found] == [(x["step"], x["split"]) for x in expected]
    for one, other in zip(found, expected, strict=True):
        assert abs(one["loss"] - other["loss"]) <= 1e-5
        assert one.get("ids") == other.get("ids")


# --- stopping and dying --------------------------------------------------------------------------


def test_a_job_that_is_stopped_and_killed_ends_as_the_straight_one(
    start, configs, tmp_path, straight, digest, log_lines
):
    work, steps = tmp_path / "work", tmp_path / "steps"
    steps.mkdir()
    flags = [f"--config={configs / 'sharded.py'}", f"--workdir={work}"]
    slowly = [*flags, "--config.pause=0.1", f"--config.steps={steps}"]

    def at(step):
        return lambda: all(
            (steps / f"{i}").exists() and int((steps / f"{i}").read_text() or 0) >= step
            for i in range(2)
        )

    # SIGTERM to process 1 alone: both stop after the same step, which is saved.
    job = start(commands(2, 1, *slowly))
    job.wait_until(at(6))
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.codes(30) == [42, 42], job.output()
    stopped = {int((steps / f"{i}").read_text()) for i in range(2)}
    assert len(stopped) == 1
    saved = max(int(path.name) for path in (work / "checkpoints").glob("[0-9]*"))
    assert {saved} == stopped
    assert f"stopped by SIGTERM at step {saved} of 30, that is saved" in job.output(0)

    # Each dies once, at no special moment; the other one notices.
    for dies in range(2):
        for path in steps.iterdir():
            path.unlink()
        job = start(commands(2, 1, *slowly))
        job.wait_until(at(saved + 2 + 5 * (dies + 1)))
        job.processes[dies].kill()
        began = time.monotonic()
        codes = job.codes(60)
        assert time.monotonic() - began < 60
        assert codes[dies] == -signal.SIGKILL
        assert codes[1 - dies] == LOST, job.output()
        assert f"process {dies} died" in job.output(1 - dies)
        assert "Traceback" not in job.output()

    # And a checkpoint is damaged: all go on from the one before.
    newest = max(int(path.name) for path in (work / "checkpoints").glob("[0-9]*"))
    files = [path for path in (work / "checkpoints" / str(newest)).rglob("*") if path.is_file()]
    for path in files:
        path.write_bytes(path.read_bytes()[:-1])
    job = start(commands(2, 1, *flags))
    assert job.codes() == [0, 0], job.output()
    assert f"going on from step {newest - 5}" in job.output(0)
    assert digest(work) == straight[1]
    assert log_lines(work) == straight[2]
    assert log_lines(work, "uneven") == log_lines(straight[0], "uneven")


def test_a_process_that_does_not_look_is_ended_too(start, configs, tmp_path):
    """Its main thread waits for something else, or in a collective that never fails."""
    (tmp_path / "steps").mkdir()
    flags = [f"--config={configs / 'sharded.py'}", f"--workdir={tmp_path / 'work'}"]
    flags += ["--config.stuck=0", f"--config.steps={tmp_path / 'steps'}"]
    job = start(commands(2, 1, *flags))
    mark = tmp_path / "steps" / "0"
    job.wait_until(lambda: mark.exists() and mark.read_text() == "7")
    job.processes[1].kill()
    assert job.codes(60) == [LOST, -signal.SIGKILL]
    assert "process 1 died; start all processes again" in job.output(0)
    assert [path.name for path in (tmp_path / "work" / "checkpoints").glob("[0-9]*")] == ["5"]


def test_an_exception_in_one_process_ends_all(start, configs, tmp_path):
    flags = [f"--config={configs / 'sharded.py'}", f"--workdir={tmp_path / 'work'}"]
    job = start(commands(2, 1, *flags, "--config.raises=1"))
    assert job.codes(90) == [LOST, 1]
    assert "process 1 ended: ArithmeticError: a hook of this process alone" in job.output(0)
    assert "Traceback" not in job.output(0)
    assert job.output(1).count("Traceback") == 1
    # What was saved before is whole.
    assert [path.name for path in (tmp_path / "work" / "checkpoints").glob("[0-9]*")] == ["5"]


def test_data_that_end_in_one_process_end_all(start, configs, tmp_path):
    flags = [f"--config={configs / 'sharded.py'}", f"--workdir={tmp_path / 'work'}"]
    job = start(commands(2, 1, *flags, "--config.ends=1"))
    assert job.codes(90) == [2, 2]
    errors = [line for line in job.output().splitlines() if "error" in line]
    assert len(errors) == 1
    assert "train_data ended after 12 batches" in errors[0]
    assert errors[0].endswith("(process 1)")


def test_a_mistake_that_process_0_finds_ends_all_and_is_said_once(
    start, configs, tmp_path, straight
):
    shutil.copytree(straight[0], tmp_path / "work")
    holder = Workdir(tmp_path / "work")
    holder.lock()
    flags = [f"--config={configs / 'sharded.py'}", f"--workdir={tmp_path / 'work'}"]
    job = start(commands(2, 1, *flags))
    assert job.codes(90) == [2, 2]
    holder.close()
    assert job.output(0).count("is in use by process") == 1
    assert job.output(1) == ""


def test_processes_of_other_configs_are_refused(start, configs, tmp_path):
    flags = [f"--config={configs / 'sharded.py'}", f"--workdir={tmp_path / 'work'}"]
    first, second = commands(2, 1, *flags)
    job = start([first, [*second, "--config.num_steps=31"]])
    assert job.codes(90) == [2, 2]
    assert "config.num_steps must be the same in all processes" in job.output(0)
    assert job.output(1) == ""
    assert not (tmp_path / "work").exists()
