"""The folder of a run: whose it is, and whether it can be used."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys

import pytest

from haikutrain.errors import UsageError
from haikutrain.workdir import Workdir


def test_nothing_is_created_before_the_claim(tmp_path):
    folder = Workdir(tmp_path / "deep" / "run")
    folder.check_owner("digits:Digits")
    folder.check_writable()
    assert list(tmp_path.iterdir()) == []
    folder.claim("digits:Digits", {"seed": 0}, ["--config.seed=0"])
    assert json.loads((tmp_path / "deep" / "run" / "config.json").read_text()) == {
        "experiment": "digits:Digits",
        "config": {"seed": 0},
        "overrides": ["--config.seed=0"],
        "started_by": f"process {os.getpid()} on {socket.gethostname()}",
    }
    # No half-written file stays, and a second claim takes the first one's place.
    folder.claim("digits:Digits", {"seed": 0}, [])
    assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "config.json"]
    assert json.loads(folder.config.read_text())["overrides"] == []


def test_the_paths_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Workdir("run")
    monkeypatch.chdir("/")
    for path in (folder.path, folder.checkpoints, folder.metrics, folder.tensorboard):
        assert path.is_relative_to(tmp_path / "run")


def test_another_experiments_run_is_refused(tmp_path):
    Workdir(tmp_path).claim("digits:Digits", {}, [])
    Workdir(tmp_path).check_owner("digits:Digits")
    with pytest.raises(UsageError) as caught:
        Workdir(tmp_path).check_owner("cifar:ResNet")
    for word in (str(tmp_path), "digits:Digits", "cifar:ResNet", "--workdir"):
        assert word in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null", "\x00"])
def test_a_config_json_that_says_no_owner_is_nobodys(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    Workdir(tmp_path).check_owner("cifar:ResNet")


def test_a_file_is_no_workdir(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt is a file"):
        Workdir(path)


@pytest.mark.parametrize(
    "where", ["file/run", "file/run/deep", "/proc/run", "x" * 300], ids=lambda where: where[:12]
)
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, where):
    (tmp_path / "file").write_text("")
    path = tmp_path / where
    with pytest.raises(UsageError, match=r"cannot be written .*another --workdir"):
        Workdir(path).check_writable()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def closed(tmp_path):
    """A folder that this user may not enter."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    superuser = os.geteuid() == 0  # It may enter every folder.
    if superuser:
        os.seteuid(65534)
    yield closed
    if superuser:
        os.seteuid(0)
    closed.chmod(0o700)


@pytest.mark.parametrize("where", [".", "run", "run/deep"])
def test_a_folder_that_may_not_be_entered_is_refused(closed, where):
    folder = Workdir(closed / where)
    folder.check_owner("digits:Digits")
    with pytest.raises(UsageError, match=r"cannot be written \(Permission denied"):
        folder.check_writable()


# --- in use ----------------------------------------------------------------------------------


HOLDER = """
import sys, time
from haikutrain.workdir import Workdir
folder = Workdir(sys.argv[1])
folder.lock()
print("locked", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `tmp_path`."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_a_lock_names_its_holder_and_ends_with_it_however_it_dies(tmp_path, holder):
    folder = Workdir(tmp_path)
    who = f"process {holder.pid} on {socket.gethostname()}"
    # config.json says who trained here before.
    (tmp_path / "config.json").write_text(json.dumps({"started_by": "process 1 on elsewhere"}))
    with pytest.raises(UsageError, match=rf"{tmp_path} is in use by {who}; .*another --workdir"):
        folder.lock()
    folder.lock("other")  # Another kind of job.
    folder.close()
    holder.kill()
    holder.wait()
    folder.lock()
    again = Workdir(tmp_path)
    with pytest.raises(UsageError, match=f"in use by process {os.getpid()} on"):
        again.lock()
    folder.close()
    again.lock()
    again.close()
    assert (tmp_path / ".lock").read_text() == ""


def test_a_folder_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = Workdir(tmp_path)
    folder.claim("digits:Digits", {}, [])
    folder.close()
    assert "cannot be locked (No locks available)" in caplog.text
