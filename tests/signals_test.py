"""Signals to the real command, kill -9 among them: nothing is lost, and the next start goes on."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

BENCHMARK = pathlib.Path(__file__).parents[1] / "benchmarks" / "faults.py"


@pytest.fixture
def start(configs, tmp_path):
    """Starts the command on the tiny experiment in `tmp_path/work`, in the background."""
    started = []

    def run(*flags, workdir=tmp_path / "work"):
        command = [sys.executable, "-m", "haikutrain.main", f"--config={configs / 'tiny.py'}"]
        process = subprocess.Popen(
            [*command, f"--workdir={workdir}", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def wait_for(process, condition):
    """Waits until there is something; fails if the process ends before."""
    while not (found := condition()):
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.communicate()}")
        time.sleep(0.002)
    return found


def steps(workdir):
    names = (path.name for path in (workdir / "checkpoints").glob("*"))
    return sorted(int(name) for name in names if name.isdecimal())


def test_sigterm_at_any_moment_is_42_and_the_next_start_goes_on_exactly(
    start, main, configs, digest, log_lines, tmp_path
):
    # A save every two steps, so that one is under way soon.
    flags = ["--config.num_steps=40", "--config.checkpoint_every=2"]
    straight, work = tmp_path / "straight", tmp_path / "work"
    main(f"--config={configs / 'tiny.py'}", f"--workdir={straight}", *flags)
    done = []
    for moment in ("trace", "save", "report", "hook"):
        marker = tmp_path / moment
        pause = () if moment == "save" else (f"--config.pause={moment}",)
        process = start(*flags, *pause, f"--config.pause_file={marker}")
        if moment == "save":
            before = steps(work)
            saves = work / "checkpoints"
            wait_for(process, lambda s=saves, b=before: set(s.glob("*tmp*")) and steps(work) != b)
        else:
            wait_for(process, marker.exists)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 42, err
        assert "Traceback" not in err
        last = err.strip().splitlines()[-1]
        step = (steps(work) or [0])[-1]
        assert last.startswith(f"haikutrain: stopped by SIGTERM at step {step} of 40")
        done.append(step)
    # Nothing was done before the first step; each later start went on.
    assert done[0] == 0 < done[1] < done[2] < done[3] < 40
    main(f"--config={configs / 'tiny.py'}", f"--workdir={work}", *flags)
    assert digest(work) == digest(straight)
    assert log_lines(work) == log_lines(straight)
    for split in ("test", "few"):
        assert log_lines(work, split) == log_lines(straight, split)


def test_a_second_ctrl_c_ends_at_once_and_the_checkpoint_before_is_whole(
    start, main, configs, digest, tmp_path
):
    process = start("--config.hold_at=9")
    wait_for(process, lambda: steps(tmp_path / "work") == [6])
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert time.monotonic() - begun < 5
    assert "SIGINT: stopping after this step" in err
    assert err.endswith("haikutrain: interrupted\n")
    assert steps(tmp_path / "work") == [6]
    other = tmp_path / "other"
    main(f"--config={configs / 'tiny.py'}", f"--workdir={other}", "--config.stop_after=6")
    assert digest(tmp_path / "work", "--step=6") == digest(other)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 42), (signal.SIGINT, 130)])
def test_an_evaluation_alone_has_nothing_to_save(start, main, configs, tmp_path, number, code):
    main(
        f"--config={configs / 'tiny.py'}", f"--workdir={tmp_path / 'work'}", "--config.num_steps=6"
    )
    marker = tmp_path / "marker"
    flags = ["--config.num_steps=6", "--config.pause=report", f"--config.pause_file={marker}"]
    process = start("--mode=eval", *flags)
    wait_for(process, marker.exists)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (code, "")
    assert err.endswith("haikutrain: interrupted\n")
    assert not (tmp_path / "work" / "metrics_eval.jsonl").exists()


def test_a_signal_while_python_is_still_importing_leaves_nothing(start, tmp_path):
    process = start()
    time.sleep(0.15)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    # Before the handler is there the system ends the process; after it nothing new is begun.
    assert process.returncode in (-signal.SIGTERM, 42), err
    assert steps(tmp_path / "work") == []
    assert "Traceback" not in err


def test_a_signal_after_the_last_save_changes_nothing(start, tmp_path):
    process = start("--config.num_steps=100000", "--config.log_every=1000")
    wait_for(process, lambda: steps(tmp_path / "work"))
    process.send_signal(signal.SIGTERM)
    for line in process.stderr:
        if "that is saved" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    assert process.returncode == 42


def test_ten_kills_lose_nothing(command):
    done = command(BENCHMARK, "--kills=10", "--terms=0", "--steps=120", check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("kill -9: 10 times, ")
    # Else the moments missed the training, and this showed nothing.
    assert int(lines[1].split()[4]) >= 3
    assert lines[2].strip() == "nothing lost: state and log are the untouched run's"
