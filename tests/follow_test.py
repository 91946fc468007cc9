"""An evaluation job beside training: each checkpoint once, and the trainer never notices."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

import haikutrain
from haikutrain import command_line
from haikutrain import follow as follow_lib
from haikutrain import main as command_main
from haikutrain.checkpoint import Checkpointer
from haikutrain.checkpoint_folder import list_steps
from haikutrain.errors import CheckpointUnreadable, UsageError

SPLITS = {"test", "few"}


@pytest.fixture
def experiment(tiny):
    """16 steps, a checkpoint after every 4, no evaluation but the last."""

    def make(kind=tiny.Tiny, **fields):
        config = tiny.get_config()
        config.num_steps, config.checkpoint_every, config.eval_every = 16, 4, None
        config.keep_checkpoints = 10
        config.update(fields)
        return kind(config)

    return make


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """A run that has ended, with checkpoints of 4, 8, 12 and 16, evaluated by the trainer too."""
    workdir = tmp_path_factory.mktemp("trained")
    config = tiny.get_config()
    config.num_steps, config.checkpoint_every, config.eval_every = 16, 4, 4
    config.keep_checkpoints = 10
    haikutrain.train(tiny.Tiny(config), workdir)
    return workdir


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(follow_lib, "_SECONDS_BETWEEN_LOOKS", 0.02)


def found(workdir):
    """Of each line of `metrics_eval.jsonl` its step and split, in order; every line is whole."""
    path = pathlib.Path(workdir) / "metrics_eval.jsonl"
    if not path.exists():
        return []
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    return [(line["step"], line["split"]) for line in lines]


def all_of(*steps):
    return [(step, split) for step in steps for split in ("test", "few")]


def contents(folder):
    """Every file with its content, and every name with the time of its last change."""
    paths = sorted(folder.rglob("*"))
    times = [(str(path), path.stat().st_mtime_ns) for path in paths]
    return times, {path: path.read_bytes() for path in paths if path.is_file()}


def test_every_checkpoint_is_evaluated_once_and_as_the_trainer_does(
    experiment, run, log_lines, caplog
):
    # What the trainer is writing.
    (run / "checkpoints" / "20.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    before = contents(run / "checkpoints")
    follow_lib.follow(experiment(), run)
    assert found(run) == all_of(4, 8, 12, 16)
    lines = [json.loads(line) for line in (run / "metrics_eval.jsonl").read_text().splitlines()]
    for split in SPLITS:
        assert [line for line in lines if line["split"] == split] == log_lines(run, split)
    assert contents(run / "checkpoints") == before
    # Again, there is nothing to do.
    follow_lib.follow(experiment(), run)
    assert found(run) == all_of(4, 8, 12, 16)


def test_it_goes_on_where_it_was_and_drops_half_a_line(experiment, run):
    follow_lib.follow(experiment(), run)
    log = run / "metrics_eval.jsonl"
    whole = log.read_bytes()
    lines = whole.splitlines(keepends=True)
    # Killed between the splits of step 8; the other line is half on disk.
    log.write_bytes(b"".join(lines[:3]) + lines[3][:10])
    follow_lib.follow(experiment(), run)
    assert log.read_bytes() == whole


def test_what_was_evaluated_by_hand_is_not_evaluated_again(experiment, run):
    haikutrain.evaluate(experiment(), run, checkpoint=12)
    follow_lib.follow(experiment(), run)
    assert found(run) == all_of(12, 4, 8, 16)


def test_one_that_the_trainer_deletes_is_left_out(tiny, experiment, run, caplog, monkeypatch):
    def report(self, state, split, rows):
        if int(state.step) == 4:  # The trainer's retention strikes meanwhile.
            shutil.rmtree(run / "checkpoints" / "8", ignore_errors=True)
        return {}

    class Gone(Checkpointer):
        def restore(self, step, *args, **kwargs):
            if step == 12:  # Or while it is being read.
                shutil.rmtree(self.directory / "12" / "params")
                (self.directory / "12").rename(self.directory / ".trash")
            return super().restore(step, *args, **kwargs)

    caplog.set_level("INFO")
    monkeypatch.setattr(tiny.Tiny, "report", report)
    monkeypatch.setattr(follow_lib, "Checkpointer", Gone)
    follow_lib.follow(experiment(), run)
    assert found(run) == all_of(4, 16)
    deleted = "the checkpoint of step 12 was deleted before it was evaluated"
    assert [r.levelname for r in caplog.records if deleted in r.getMessage()] == ["INFO"]


def test_a_damaged_one_is_left_out_with_one_warning_until_it_is_written_anew(
    experiment, run, caplog, monkeypatch
):
    good = shutil.copytree(run / "checkpoints" / "8", run.parent / "good")
    ended = shutil.copytree(run / "checkpoints" / "16", run.parent / "ended")
    shutil.rmtree(run / "checkpoints" / "16")
    (run / "checkpoints" / "8" / "rng" / "_METADATA").write_text("")
    turns = []

    def sleep(seconds):
        turns.append(found(run))
        if len(turns) == 3:  # The trainer sets it aside, and comes to that step again.
            (run / "checkpoints" / "8").rename(run / "checkpoints" / ".damaged")
            good.rename(run / "checkpoints" / "8")
        if len(turns) == 5:
            ended.rename(run / "checkpoints" / "16")

    monkeypatch.setattr(follow_lib.time, "sleep", sleep)
    follow_lib.follow(experiment(), run)
    assert turns[:3] == [all_of(4, 12)] * 3
    assert found(run) == all_of(4, 12, 8, 16)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [text for text in warnings if "8 is damaged: item rng: " in text] == warnings
    assert len(warnings) == 1


def test_one_that_cannot_be_read_now_is_tried_again(experiment, run, caplog, monkeypatch):
    tries = []

    class Stale(Checkpointer):
        def restore(self, step, *args, **kwargs):
            if step == 16:
                tries.append(step)
                if len(tries) < 4:
                    raise CheckpointUnreadable("checkpoint 16: Stale file handle")
            return super().restore(step, *args, **kwargs)

    monkeypatch.setattr(follow_lib, "Checkpointer", Stale)
    follow_lib.follow(experiment(), run)
    assert len(tries) == 4
    assert found(run) == all_of(4, 8, 12, 16)
    assert caplog.text.count("Stale file handle; trying again") == 1


def test_a_second_one_is_refused_and_a_killed_one_is_not_in_the_way(experiment, run):
    folder = follow_lib.Workdir(run)
    folder.lock(".lock-follow")
    with pytest.raises(UsageError, match=f"is in use by process {os.getpid()}"):
        follow_lib.follow(experiment(), run)
    assert found(run) == []
    folder.close()
    follow_lib.follow(experiment(), run)
    assert found(run) == all_of(4, 8, 12, 16)


def test_what_does_not_fit_is_a_mistake(tiny, experiment, run, tmp_path):
    with pytest.raises(UsageError, match="does not fit the experiment"):
        follow_lib.follow(experiment(net="conv"), run)

    class Blind(tiny.Tiny):
        def eval_data(self):
            return {}

    with pytest.raises(UsageError, match="has no eval_data"):
        follow_lib.follow(experiment(Blind), run)

    class Other(tiny.Tiny):
        pass

    with pytest.raises(UsageError, match="holds a run of"):
        follow_lib.follow(experiment(Other), run)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--follow"], "--follow does nothing with --mode=train: add --mode=eval"),
        (["--mode=eval", "--follow", "--checkpoint=latest"], "--checkpoint=latest is of one"),
        (["--mode=eval", "--follow", "--predictions=p.npz"], "--predictions=p.npz is of one"),
    ],
)
def test_flags_that_it_cannot_be_given_with_are_refused(flags, said):
    with pytest.raises(UsageError) as error:
        command_line.parse(["main", "--config=run.py", *flags])
    assert str(error.value).startswith(said)


# --- as processes ----------------------------------------------------------------------------


# Waits after each step that a file tells it to wait for, so that tests know where it stands.
PACED = """

import pathlib
import time


class Run(Base):
    def hooks(self):
        def wait(info):
            folder = self.config.pace
            while folder and not pathlib.Path(folder, f"go-{info.step}").exists():
                time.sleep(0.02)

        return [haikutrain.every(4, wait)]
"""
FIELDS = """
    config.num_steps = 16
    config.checkpoint_every = 4
    config.keep_checkpoints = 1
    config.pace = ""
    return config
"""


@pytest.fixture(scope="module")
def config_file(configs, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "run.py"
    text = (configs / "plain.py").read_text()
    path.write_text(text.replace("    return config\n", FIELDS, 1) + PACED)
    return path


@pytest.fixture
def begin(config_file):
    """Starts the command; ends it with the test."""
    with contextlib.ExitStack() as stack:

        def start(workdir, *flags):
            argv = ["-m", "haikutrain.main", f"--config={config_file}", f"--workdir={workdir}"]
            process = subprocess.Popen(
                [sys.executable, *argv, "--cpu_devices=1", *flags],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def wait_until(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_beside_a_live_trainer(begin, main, digest, config_file, tmp_path):
    workdir, pace = tmp_path / "deep" / "run", tmp_path
    follower = begin(workdir, "--mode=eval", "--follow")
    trainer = begin(workdir, f"--config.pace={pace}")
    checkpoints = workdir / "checkpoints"
    (pace / "go-4").touch()
    wait_until(lambda: list_steps(checkpoints) == [4], trainer)
    wait_until(lambda: found(workdir) == [(4, "eval")], follower)

    # The trainer stands at step 8 now: whatever reads meanwhile changes nothing.
    before = contents(checkpoints)
    second = main(f"--config={config_file}", f"--workdir={workdir}", "--cpu_devices=1", check=False)
    assert second.returncode == 2
    assert f"is in use by process {trainer.pid} on {os.uname().nodename}" in second.stderr
    assert len(digest(workdir)) == 64
    assert contents(checkpoints) == before

    # Ended by a signal, it goes on where it was.
    follower.send_signal(signal.SIGTERM)
    assert follower.wait(60) == 42
    follower = begin(workdir, "--mode=eval", "--follow")
    (pace / "go-8").touch()
    wait_until(lambda: found(workdir) == [(4, "eval"), (8, "eval")], follower)
    for step in (12, 16):
        (pace / f"go-{step}").touch()
    assert trainer.wait(60) == 0
    assert follower.wait(60) == 0
    steps = [step for step, _ in found(workdir)]
    assert steps in ([4, 8, 12, 16], [4, 8, 16])  # 12 may be gone before it is looked at.
    assert re.search(r"step 16/16 +eval +loss", follower.stderr.read())
    alone = tmp_path / "alone"
    main(f"--config={config_file}", f"--workdir={alone}", "--cpu_devices=1")
    assert digest(workdir) == digest(alone)
    assert list_steps(checkpoints) == [16]


def test_killed_at_any_moment_no_line_is_torn_and_none_is_there_twice(begin, config_file, tmp_path):
    workdir = tmp_path / "run"
    fields = ["--config.checkpoint_every=1", "--config.keep_checkpoints=20"]
    flags = [f"--config={config_file}", f"--workdir={workdir}"]
    assert command_main.run([*flags, *fields]) == 0
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        follower = begin(workdir, "--mode=eval", "--follow")
        known = len(found(workdir))
        wait_until(lambda known=known: len(found(workdir)) > known, follower)
        follower.send_signal(number)
        code = follower.wait(60)
        assert code in {0, {signal.SIGKILL: -9, signal.SIGTERM: 42, signal.SIGINT: 130}[number]}
    assert command_main.run([*flags, "--mode=eval", "--follow"]) == 0
    assert found(workdir) == [(step, "eval") for step in range(1, 17)]
