"""`python -m haikutrain.launch`: one command, several processes, one exit code."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest


@pytest.fixture
def outcome(command):
    """What the launcher makes of processes that are small shell scripts: code, output, seconds."""

    def run(*scripts, patience=0.3, grace=30.0, before="", timeout=60):
        source = f"""
import os, signal, sys, threading, time
from haikutrain import launch
launch._PATIENCE, launch._GRACE = {patience}, {grace}
job = launch._Job()
{before}
job.start([["sh", "-c", script] for script in {scripts!r}], {{"LETTER": "x"}})
began = time.monotonic()
code = job.wait()
print("seconds", time.monotonic() - began)
sys.exit(code)
"""
        done = command("-c", source, check=False, timeout=timeout)
        lines = done.stdout.splitlines()
        return done.returncode, "\n".join(lines[:-1]), done.stderr, float(lines[-1].split()[1])

    return run


@pytest.mark.parametrize(
    "scripts, code",
    [
        (["exit 0", "exit 0"], 0),
        (["exit 42", "exit 42"], 42),
        (["exit 0", "exit 42"], 42),
        (["exit 75", "sleep 0.2; exit 1"], 1),
        (["exit 3", "sleep 0.2; exit 1"], 3),
        (["exit 75", "exit 75"], 75),
        (["kill -9 $$", "sleep 60"], 75),
        (["kill -9 $$", "trap 'exit 42' TERM; while :; do sleep 0.05; done"], 75),
        (["kill -SEGV $$", "sleep 60"], 1),
        (["exit 1", "sleep 60"], 1),
    ],
)
def test_the_first_code_that_says_why_is_the_jobs(outcome, scripts, code):
    got, _, _, seconds = outcome(*scripts)
    assert got == code
    assert seconds < 10


def test_who_does_not_end_when_asked_is_killed(outcome):
    stubborn = "trap '' TERM; while :; do sleep 0.1; done"
    code, _, _, seconds = outcome("exit 2", stubborn, grace=1.0)
    assert code == 2
    assert 1.0 < seconds < 10


def test_lines_come_whole_behind_the_number_of_their_process(outcome):
    talk = "for i in 1 2 3; do echo out $i $LETTER; echo err $i >&2; done; printf last"
    code, out, err, _ = outcome(talk, talk)
    assert code == 0
    for index in range(2):
        own = [line for line in out.splitlines() if line.startswith(f"[{index}] ")]
        assert own == [f"[{index}] out {i} x" for i in (1, 2, 3)] + [f"[{index}] last"]
    assert sorted(err.splitlines()) == sorted(f"[{i}] err {n}" for i in range(2) for n in (1, 2, 3))


@pytest.mark.parametrize(
    "script, name, code",
    [
        ("trap 'exit 42' TERM; while :; do sleep 0.05; done", "SIGTERM", 42),
        ("sleep 60", "SIGTERM", 42),  # Not yet as far as to catch it.
        ("trap 'exit 42' INT; while :; do sleep 0.05; done", "SIGINT", 42),
    ],
)
def test_signals_are_passed_on(outcome, script, name, code):
    later = f"threading.Timer(0.5, job.forward, [signal.{name}]).start()"
    got, _, _, seconds = outcome(script, script, before=later)
    assert got == code
    assert seconds < 10


@pytest.mark.parametrize(
    "argv, expected",
    [
        ([], "--nproc"),
        (["--nproc=2"], "no flags for the processes behind --"),
        (["--nproc=2", "--config=a.py"], "--config=a.py"),
        (["--nproc=0", "--", "--config=a.py"], "--nproc=0"),
    ],
)
def test_mistakes_in_its_own_flags_are_one_line(command, argv, expected):
    done = command("-m", "haikutrain.launch", *argv, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert expected in done.stderr


def test_a_mistake_in_the_config_is_said_once(command):
    argv = ["--nproc=2", "--cpu_devices=1", "--", "--config=nowhere.py"]
    done = command("-m", "haikutrain.launch", *argv, check=False)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if "Gloo" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("[0] haikutrain: error: ")
    assert "nowhere.py" in lines[0]


class Launched:
    def __init__(self, configs, folder):
        self.work = folder / "work"
        self.err = folder / "err"
        flags = [f"--config={configs / 'sharded.py'}", f"--workdir={self.work}"]
        flags += ["--config.num_steps=5000", "--config.pause=0.05", "--config.checkpoint_every=5"]
        argv = ["-m", "haikutrain.launch", "--nproc=2", "--cpu_devices=1", "--", *flags]
        with self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, *argv], stdout=subprocess.DEVNULL, stderr=err
            )

    def wait_for_a_checkpoint(self):
        deadline = time.monotonic() + 90
        while not (self.work / "checkpoints" / "5").exists():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def children(self):
        """The processes of the job, by their command lines."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if f"--workdir={self.work}".encode() in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
        return [pid for pid in found if pid != self.process.pid]


@pytest.fixture
def launched(configs, tmp_path):
    job = Launched(configs, tmp_path)
    yield job
    for pid in [job.process.pid, *job.children()]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    job.process.wait()


def test_sigterm_to_the_launcher_stops_the_job(launched):
    launched.wait_for_a_checkpoint()
    launched.process.terminate()
    assert launched.process.wait(30) == 42
    saved = max(int(path.name) for path in (launched.work / "checkpoints").glob("[0-9]*"))
    assert f"[0] haikutrain: stopped by SIGTERM at step {saved} of 5000" in launched.err.read_text()
    assert launched.children() == []


def test_processes_end_with_the_launcher(launched):
    launched.wait_for_a_checkpoint()
    assert len(launched.children()) == 2
    launched.process.kill()
    launched.process.wait()
    deadline = time.monotonic() + 10
    while launched.children():
        assert time.monotonic() < deadline
        time.sleep(0.05)


SLURM = pathlib.Path(__file__).parents[1] / "docs" / "slurm.sh"


@pytest.fixture
def batch(tmp_path):
    """Starts the sample script with a `srun` that runs this, and a `scontrol` that takes note."""

    def run(srun, **environment):
        for name, script in (("srun", srun), ("scontrol", f"echo $@ >> {tmp_path}/requeued")):
            (tmp_path / name).write_text(f"#!/bin/sh\necho $@ > {tmp_path}/{name}ed\n{script}\n")
            (tmp_path / name).chmod(0o755)
        path = f"{tmp_path}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "77", **environment}
        return subprocess.Popen(["bash", SLURM], env=environment, stdout=subprocess.PIPE, text=True)

    return run


@pytest.mark.parametrize(
    "code, restarts, again",
    [
        (0, "0", False),
        (1, "0", False),
        (2, "0", False),
        (3, "0", False),
        (42, "0", True),
        (42, "500", True),
        (75, "0", True),
        (137, "19", True),
        (75, "20", False),
    ],
)
def test_the_sample_of_slurm_requeues_by_exit_code(batch, tmp_path, code, restarts, again):
    job = batch(f"exit {code}", SLURM_RESTART_COUNT=restarts)
    out, _ = job.communicate(timeout=20)
    assert job.returncode == code
    assert (tmp_path / "requeued").exists() == again
    if again:
        assert (tmp_path / "requeued").read_text() == "requeue 77\n"
        assert str(code) in out
    assert "--workdir=runs/77" in (tmp_path / "sruned").read_text()


def test_the_sample_of_slurm_outlives_a_signal(batch, tmp_path):
    job = batch("sleep 1; exit 42")
    deadline = time.monotonic() + 10
    while not (tmp_path / "sruned").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.terminate()
    job.communicate(timeout=20)
    assert job.returncode == 42
    assert (tmp_path / "requeued").exists()


def test_flags_that_the_launcher_sets_are_refused_behind_the_dashes(command):
    flags = ["--nproc=2", "--", "--config=x.py", "--process_id=1"]
    done = command("-m", "haikutrain.launch", *flags, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("haikutrain: error: --process_id=1 behind -- is for this command")
    assert done.stderr.count("\n") == 1
