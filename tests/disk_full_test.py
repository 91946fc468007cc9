"""Disks that are full, on real ones: said at once, nothing lost that was there, tried again."""

import errno
import json
import os
import pathlib
import re
import subprocess
import threading
import time

import pytest

import haikutrain
from haikutrain import main as command_main
from haikutrain import os_errors
from haikutrain.checkpoint import Checkpointer
from haikutrain.checkpoint_folder import list_steps
from haikutrain.checkpoint_process import Writer, WriterDied
from haikutrain.errors import SavesFailed, UsageError

# A run of 40 steps with a checkpoint every 10; its disk is full from one step to another.
SOURCE = """

import pathlib
import time

from haikutrain.checkpoint import Checkpointer

used = []
original = Checkpointer.save


def save(checkpointer, *args, **kwargs):
    used[:] = [checkpointer]
    original(checkpointer, *args, **kwargs)


Checkpointer.save = save


class Run(Base):
    def hooks(self):
        filler = pathlib.Path(self.config.filler)

        def hook(info):
            if info.step == self.config.fill_at:
                with open(filler, "wb", buffering=0) as file:
                    try:
                        while True:
                            file.write(bytes(4096))
                    except OSError:
                        pass
            if info.step == self.config.free_at:
                filler.unlink()
            # A save has ended before the disk is filled or freed.
            while self.config.filler and used and not used[0].is_idle():
                time.sleep(0.01)

        return [hook]
"""
FIELDS = """
    config.num_steps = 40
    config.checkpoint_every = 10
    config.filler = ""
    config.fill_at = config.free_at = 0
    return config
"""


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A small disk of its own: a folder of 2 MB, all of it free at the start of each test."""
    folder = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only the superuser can mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def config_file(configs, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "run.py"
    text = (configs / "plain.py").read_text()
    path.write_text(text.replace("    return config\n", FIELDS, 1) + SOURCE)
    return path


@pytest.fixture(scope="module")
def start(command, config_file):
    """The command on a workdir: the finished process."""

    def run(workdir, *flags, check=False):
        given = [f"--config={config_file}", f"--workdir={workdir}", "--cpu_devices=1"]
        return command("-m", "haikutrain.main", *given, *flags, check=check)

    return run


@pytest.fixture(scope="module")
def straight(start, tmp_path_factory):
    """The run with room enough."""
    workdir = tmp_path_factory.mktemp("straight") / "run"
    start(workdir, check=True)
    return workdir


@pytest.fixture
def workdir(disk):
    yield disk / "run"
    subprocess.run(f"rm -rf {disk}/*", shell=True, check=True)


def full(workdir, fill_at, free_at=0):
    filler = workdir.parent / "filler"
    fields = {"filler": filler, "fill_at": fill_at, "free_at": free_at}
    return [f"--config.{name}={value}" for name, value in fields.items()]


def errors(done):
    """What stderr says besides the log and the beginning, without severity, time and place."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("step ")]
    return [re.sub(r"^E\d.*?\] ", "", line) for line in lines if "No space" in line]


def leftovers(workdir):
    return {name for name in os.listdir(workdir / "checkpoints") if not name.isdecimal()}


def assert_same_run(workdir, straight, log_lines):
    for split in ("train", "eval"):
        assert log_lines(workdir, split) == log_lines(straight, split)
    digests = []
    for folder in (workdir, straight):
        reader = Checkpointer(folder / "checkpoints", read_only=True)
        assert reader.steps() == [20, 30, 40]
        digests.append(haikutrain.digest(reader.read(40).state))
    assert digests[0] == digests[1]


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else(
    start, workdir, straight, log_lines
):
    # Step 20 cannot be saved, nor 10 steps of log; 30 can.
    done = start(workdir, *full(workdir, fill_at=15, free_at=26), check=True)
    said = "the checkpoint of step 20 could not be saved: No space left on device (failure 1 of 3"
    (line,) = [line for line in errors(done) if "checkpoint" in line]
    assert line.startswith(said)
    lines = done.stderr.splitlines()
    (place,) = [i for i, line in enumerate(lines) if said in line]
    # At once: before the next save, and before the disk has room again.
    assert any(line.startswith("step 25/40") for line in lines[place:])
    assert "Traceback" not in done.stderr
    for split in ("train", "eval"):
        assert log_lines(workdir, split) == log_lines(straight, split)
    reader = Checkpointer(workdir / "checkpoints", read_only=True)
    assert reader.steps() == [10, 30, 40]
    expected = Checkpointer(straight / "checkpoints", read_only=True).read(40).state
    assert haikutrain.digest(reader.read(40).state) == haikutrain.digest(expected)
    assert leftovers(workdir) == set()


def test_a_disk_that_stays_full_stops_the_run_which_goes_on_when_there_is_room(
    start, workdir, straight, log_lines
):
    done = start(workdir, *full(workdir, fill_at=15), "--config.max_failed_saves=2")
    assert done.returncode == 1
    *said, last = [line for line in errors(done) if "checkpoint" in line]
    assert [line.split(": ")[0] for line in said] == [
        f"the checkpoint of step {step} could not be saved" for step in (20, 30)
    ]
    assert last.startswith("haikutrain: too many saves in a row have failed (max_failed_saves=2), ")
    assert "the last at step 30: No space left on device; the newest is of step 10" in last
    assert done.stderr.splitlines()[-1] == last
    assert "Traceback" not in done.stderr
    assert list_steps(workdir / "checkpoints") == [10]
    assert leftovers(workdir) == set()

    # On the disk as it is it cannot even begin, and spoils nothing.
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    done = start(workdir)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()[-1:]
    assert f"workdir {workdir} cannot be written (No space left on device)" in line
    after = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    assert after == before

    (workdir.parent / "filler").unlink()
    start(workdir, check=True)
    assert_same_run(workdir, straight, log_lines)


def test_a_run_whose_last_save_fails_says_so_by_its_exit_code(start, workdir, straight, log_lines):
    done = start(workdir, *full(workdir, fill_at=35))
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "haikutrain: the last checkpoint of the run could not be saved: No space"
    )
    assert "the newest is of step 30" in last
    assert leftovers(workdir) == set()
    (workdir.parent / "filler").unlink()
    start(workdir, check=True)
    assert_same_run(workdir, straight, log_lines)


def test_a_run_on_a_full_disk_is_not_begun(config_file, workdir, capsys):
    with pytest.raises(OSError, match="No space left"):
        (workdir.parent / "filler").write_bytes(bytes(3 << 20))
    assert command_main.run([f"--config={config_file}", f"--workdir={workdir}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be written (No space left on device)" in line
    assert [path.name for path in workdir.parent.rglob("*") if path.suffix == ".tmp"] == []


def test_a_read_only_disk_is_called_so(tmp_path, disk):
    del disk  # Who can mount one can mount the other.
    folder = tmp_path / "checkpoints"
    checkpointer = Checkpointer(folder)
    save(checkpointer, 1)
    checkpointer.wait()
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        save(checkpointer, 2)
        with pytest.raises(OSError) as caught:  # noqa: PT011
            checkpointer.wait()
        assert os_errors.reason(caught.value) == "Read-only file system"
    finally:
        subprocess.run(["umount", folder], check=True)
    save(checkpointer, 3)
    checkpointer.close()
    assert checkpointer.steps() == [1, 3]


def save(checkpointer, step):
    state = haikutrain.TrainState(params={"w": [step, 2.0]}, network_state={}, opt_state={})
    checkpointer.save(step, state, meta={}, data=None)


# --- what is done about it -------------------------------------------------------------------


@pytest.fixture
def experiment(tiny):
    """An experiment with a checkpoint after 4, 8, 12 and 16 steps."""

    def make(kind=tiny.Tiny, **fields):
        config = tiny.get_config()
        config.num_steps, config.checkpoint_every, config.eval_every = 16, 4, None
        config.log_every = 1
        config.update(fields)
        return kind(config)

    return make


@pytest.fixture
def fail_at(monkeypatch):
    """Makes the writes of checkpoints of these steps fail."""
    failing = set()
    original = Writer.write

    def write(writer, step, *args):
        if step in failing:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        original(writer, step, *args)

    monkeypatch.setattr(Writer, "write", write)
    return failing.update


@pytest.mark.parametrize(
    "failing, limit, steps, last",
    [
        ([4, 12], 2, [8, 16], None),  # Not in a row.
        ([4, 8], 3, [12, 16], None),
        (
            [4, 8],
            2,
            [],
            "too many saves in a row have failed (max_failed_saves=2), the last at step 8",
        ),
        ([8, 12, 16], 3, [4], "too many saves in a row have failed (max_failed_saves=3)"),
        ([16], 3, [4, 8, 12], "the last checkpoint of the run could not be saved"),
        (
            [8],
            1,
            [4],
            "too many saves in a row have failed (max_failed_saves=1), the last at step 8",
        ),
    ],
)
def test_so_many_in_a_row_end_the_run(
    experiment, tmp_path, fail_at, caplog, failing, limit, steps, last
):
    fail_at(failing)
    made = experiment(max_failed_saves=limit, keep_checkpoints=4)
    if last is None:
        haikutrain.train(made, tmp_path)
    else:
        with pytest.raises(SavesFailed) as caught:
            haikutrain.train(made, tmp_path)
        assert str(caught.value).startswith(last)
        assert "Disk quota exceeded" in str(caught.value)
    assert list_steps(tmp_path / "checkpoints") == steps
    said = [r.getMessage() for r in caplog.records if "could not be saved" in r.getMessage()]
    assert [int(re.search(r"step (\d+)", text)[1]) for text in said] == failing


def test_a_writer_that_was_killed_is_not_taken_for_a_full_disk(experiment, tmp_path, monkeypatch):
    def write(*args):
        try:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        except OSError:
            raise WriterDied("the process that writes checkpoints was killed") from None

    monkeypatch.setattr(Writer, "write", write)
    with pytest.raises(SavesFailed) as caught:
        haikutrain.train(experiment(max_failed_saves=1), tmp_path)
    told = "the process that writes checkpoints was killed; there is no checkpoint; start again"
    assert str(caught.value).endswith(f"step 4: {told}")


def test_a_failed_save_is_said_at_the_next_call_and_not_at_the_next_save(
    tiny, experiment, tmp_path, fail_at, caplog, monkeypatch
):
    used, said_by = [], {}
    original = Checkpointer.save

    def save(checkpointer, *args, **kwargs):
        original(checkpointer, *args, **kwargs)
        used.append(checkpointer)

    class Watching(tiny.Tiny):
        def hooks(self):
            def watch(info):
                while info.step == 5 and not used[0].is_idle():
                    time.sleep(0.01)
                texts = [record.getMessage() for record in caplog.records]
                said_by[info.step] = any("step 4 could not be saved" in text for text in texts)

            return [watch]

    fail_at([4])
    monkeypatch.setattr(Checkpointer, "save", save)
    haikutrain.train(experiment(Watching), tmp_path)
    assert (said_by[4], said_by[6]) == (False, True)


def test_no_checkpoint_is_ahead_of_a_log_that_cannot_be_written(
    experiment, tmp_path, monkeypatch, log_lines, caplog
):
    haikutrain.train(experiment(), tmp_path / "straight")
    log = tmp_path / "run" / "metrics.jsonl"
    original = os.write

    def write(file, piece):
        # From the line of step 6 on, until the line of step 13 is made.
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{file}"))
        if path == log and json.loads(bytes(piece))["step"] >= 6 and not has_room():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(file, piece)

    def has_room():
        return any("the checkpoint of step 12" in r.getMessage() for r in caplog.records)

    monkeypatch.setattr(os, "write", write)
    haikutrain.train(experiment(keep_checkpoints=4), tmp_path / "run")
    assert list_steps(tmp_path / "run" / "checkpoints") == [4, 16]
    texts = [record.getMessage() for record in caplog.records]
    assert f"{log} cannot be written: No space left on device; kept in memory" in "".join(texts)
    for step in (8, 12):
        wanted = f"the checkpoint of step {step} could not be saved: No space left on device"
        assert sum(text.startswith(wanted) for text in texts) == 1
    for split in ("train", "test", "few"):
        assert log_lines(tmp_path / "run", split) == log_lines(tmp_path / "straight", split)


def test_a_log_that_is_lost_at_the_sync_is_a_failed_save_and_is_written_again(
    experiment, tmp_path, monkeypatch, log_lines, caplog
):
    haikutrain.train(experiment(), tmp_path / "straight")
    log = tmp_path / "run" / "metrics.jsonl"
    original, sizes = os.fsync, []

    def fsync(file):
        if os.readlink(f"/proc/self/fd/{file}") == str(log):
            sizes.append(os.fstat(file).st_size)
            if len(sizes) == 2:  # Of the save of step 8: the server had no room.
                os.ftruncate(file, sizes[0] + 20)
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        original(file)

    monkeypatch.setattr(os, "fsync", fsync)
    haikutrain.train(experiment(keep_checkpoints=4), tmp_path / "run")
    assert list_steps(tmp_path / "run" / "checkpoints") == [4, 12, 16]
    assert "the checkpoint of step 8 could not be saved: Disk quota exceeded" in caplog.text
    for split in ("train", "test", "few"):
        assert log_lines(tmp_path / "run", split) == log_lines(tmp_path / "straight", split)


def test_a_folder_that_is_in_the_way_costs_one_checkpoint(tiny, experiment, tmp_path, caplog):
    class Careless(tiny.Tiny):
        def hooks(self):
            def make(info):
                if info.step == 6:
                    (tmp_path / "checkpoints" / "8").mkdir()

            return [make]

    haikutrain.train(experiment(Careless, keep_checkpoints=4), tmp_path)
    assert list_steps(tmp_path / "checkpoints") == [4, 12, 16]
    assert "checkpoints/8 is in the way and is no checkpoint; move it elsewhere" in caplog.text


def test_an_exception_is_not_hidden_by_a_disk_that_is_full_as_well(
    tiny, experiment, tmp_path, monkeypatch, caplog
):
    raised = threading.Event()

    def write(*args):
        assert raised.wait(60)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    class Failing(tiny.Tiny):
        def hooks(self):
            def fail(info):
                if info.step == 5:
                    raised.set()
                    raise ZeroDivisionError("in a hook")

            return [fail]

    monkeypatch.setattr(Writer, "write", write)
    with pytest.raises(ZeroDivisionError, match="in a hook"):
        haikutrain.train(experiment(Failing, max_failed_saves=1), tmp_path)
    assert "the checkpoint of step 4 could not be saved: Disk quota exceeded" in caplog.text


def test_a_state_that_cannot_be_stored_is_a_mistake_and_no_failed_save(
    tiny, experiment, tmp_path, monkeypatch
):
    def save(*args, **kwargs):
        raise UsageError("the input's position holds a lock")

    monkeypatch.setattr(Checkpointer, "save", save)
    with pytest.raises(UsageError, match="holds a lock"):
        haikutrain.train(experiment(), tmp_path)
