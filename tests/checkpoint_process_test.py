"""The process that writes checkpoints: it copies little, is replaced, and ends with its owner."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from haikutrain import checkpoint_process
from haikutrain.checkpoint import Checkpointer
from haikutrain.checkpoint_folder import list_steps
from haikutrain.checkpoint_process import WriterDied
from haikutrain.train_state import TrainState

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


@pytest.fixture
def checkpointer(tmp_path):
    made = Checkpointer(tmp_path)
    yield made
    made.close()


def state_of(*arrays):
    params = {str(number): array for number, array in enumerate(arrays)}
    return TrainState(params=params, network_state={}, opt_state={})


def save(checkpointer, step, state=None, **kwargs):
    checkpointer.save(step, state or state_of(np.ones(3)), meta={}, data=None, **kwargs)


def pid_of(checkpointer):
    return checkpointer._writer._child._process.pid


def maps(pid):
    lines = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if "memfd:haikutrain" in line]


def test_arrays_of_all_kinds_come_back_wherever_they_lay(checkpointer):
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    others = [
        np.asfortranarray(whole),
        whole[:, ::2],
        np.float64(0.5) * np.ones(()),
        np.arange(5, dtype=ml_dtypes.bfloat16),
        np.zeros((0, 3), np.int8),
        np.array([True, False]),
    ]
    ours = checkpointer.buffers([((7, 3), np.dtype(np.float32)), ((5,), np.dtype(np.uint8))])
    for array in ours:
        array[...] = np.random.default_rng(0).integers(0, 100, array.shape)
    state = state_of(*ours, *others, ours[0].T, ours[0][1:3])
    save(checkpointer, 1, state)
    checkpointer.wait()
    found = checkpointer.read(1).state
    for name, array in state.params.items():
        np.testing.assert_array_equal(found[f"params/{name}"], array)
        assert found[f"params/{name}"].dtype == array.dtype


def test_what_lies_in_shared_memory_is_not_copied(checkpointer):
    (ours,) = checkpointer.buffers([((1 << 20,), np.dtype(np.float32))])
    save(checkpointer, 1, state_of(ours))
    checkpointer.wait()
    sizes = {name: memory.size for name, memory in checkpointer._writer._memories.items()}
    assert sizes["state"] == 4 << 20
    assert sizes["others"] < 1000
    save(checkpointer, 2, state_of(np.array(ours)))
    checkpointer.wait()
    assert checkpointer._writer._memories["others"].size >= 4 << 20


def test_it_sees_what_the_buffers_hold_at_each_save_and_no_descriptor_is_left_open(checkpointer):
    counts = []
    for step in range(1, 8):
        size = 1000 if step < 5 else 100_000  # Too much for the memory there was.
        (ours,) = checkpointer.buffers([((size,), np.dtype(np.int32))])
        ours[...] = step
        save(checkpointer, step, state_of(ours))
        checkpointer.wait()
        np.testing.assert_array_equal(checkpointer.read(step).state["params/0"], ours)
        pids = os.getpid(), pid_of(checkpointer)
        counts.append([len(os.listdir(f"/proc/{pid}/fd")) for pid in pids])
    assert counts[2] == counts[3] == counts[5] == counts[6]


def test_one_that_was_killed_is_replaced(checkpointer, tmp_path):
    save(checkpointer, 1)
    checkpointer.wait()
    first = pid_of(checkpointer)
    os.kill(first, signal.SIGKILL)
    save(checkpointer, 2)
    checkpointer.wait()
    second = pid_of(checkpointer)
    assert second != first

    # While it writes: what it wrote is written again.
    save(checkpointer, 3, before=lambda arrays: kill_once([second]))
    checkpointer.wait()
    assert pid_of(checkpointer) not in (first, second)
    assert checkpointer.steps() == [1, 2, 3]

    # Again and again: the save fails, and the next is as any other.
    save(checkpointer, 4, before=lambda arrays: os.kill(pid_of(checkpointer), signal.SIGKILL))
    with pytest.raises(WriterDied, match=r"was killed \(SIGKILL"):
        checkpointer.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3"]
    save(checkpointer, 5)
    checkpointer.wait()
    assert checkpointer.steps() == [2, 3, 5]


def test_one_that_dies_as_it_is_taken_is_replaced(tmp_path, monkeypatch):
    first = Checkpointer(tmp_path / "first")
    save(first, 1)
    first.close()
    (child,) = checkpoint_process._idle
    child._process.kill()
    child._process.wait()
    monkeypatch.setattr(child, "runs", lambda: True)
    second = Checkpointer(tmp_path / "second")
    second.start_writer()
    save(second, 1)
    second.close()
    assert second.steps() == [1]


def kill_once(pids):
    if os.path.exists(f"/proc/{pids[0]}/stat"):
        os.kill(pids[0], signal.SIGKILL)


def test_signals_meant_for_the_training_process_do_not_end_it(checkpointer):
    checkpointer.start_writer()
    pid = pid_of(checkpointer)  # It has hardly begun.
    for number in SIGNALS:
        os.kill(pid, number)
    save(checkpointer, 1)
    checkpointer.wait()
    for number in SIGNALS:
        os.kill(pid, number)
    save(checkpointer, 2)
    checkpointer.wait()
    assert pid_of(checkpointer) == pid
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_what_is_refused_while_it_is_being_written_is_never_committed(checkpointer, tmp_path):
    def refuse(arrays):
        deadline = time.monotonic() + 60
        while not any("tmp" in path.name for path in tmp_path.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raise ValueError("not this one")

    save(checkpointer, 1, before=refuse)
    with pytest.raises(ValueError, match="not this one"):
        checkpointer.wait()
    assert list(tmp_path.iterdir()) == []


def test_the_next_checkpointer_uses_it_too_and_memory_is_freed(tmp_path):
    pids = []
    for name in ("a", "b"):
        checkpointer = Checkpointer(tmp_path / name)
        checkpointer.buffers([((1000,), np.dtype(np.float32))])
        save(checkpointer, 1)
        checkpointer.wait()
        pids.append(pid_of(checkpointer))
        assert len(maps(pids[-1])) == 2
        checkpointer.close()
    assert pids[0] == pids[1]
    deadline = time.monotonic() + 10
    while maps(pids[0]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # Two at once have one each.
    both = [Checkpointer(tmp_path / name) for name in ("c", "d")]
    for checkpointer in both:
        save(checkpointer, 1)
    assert len({pid_of(checkpointer) for checkpointer in both}) == 2
    for checkpointer in both:
        checkpointer.close()


def test_a_thread_that_ends_takes_it_along_and_another_takes_its_place(tmp_path):
    first = Checkpointer(tmp_path / "first")

    def run():
        save(first, 1)
        first.wait()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    save(first, 2)
    first.close()
    assert list_steps(tmp_path / "first") == [1, 2]


CLOSED = """
import os, sys
import numpy as np
from haikutrain.checkpoint import Checkpointer
from haikutrain.train_state import TrainState

for number in (0, 1):
    os.close(number)
checkpointer = Checkpointer(sys.argv[1])
state = TrainState(params={"w": np.ones(3)}, network_state={}, opt_state={})
checkpointer.save(1, state, meta={}, data=None)
checkpointer.close()
"""


def test_closed_streams_do_not_matter(command, tmp_path):
    assert command("-c", CLOSED, tmp_path).stderr == ""
    assert list_steps(tmp_path) == [1]


SCRIPT = """
import os, sys, time
import numpy as np
from haikutrain.checkpoint import Checkpointer
from haikutrain.train_state import TrainState

def before(arrays):
    folder, mode = sys.argv[1:]
    if mode == "wait":
        while not any("tmp" in name for name in os.listdir(folder)):
            time.sleep(0.01)
    print(checkpointer._writer._child._process.pid, flush=True)
    if mode == "wait":
        time.sleep(60)
    elif mode == "exit":
        os._exit(5)

checkpointer = Checkpointer(sys.argv[1])
state = TrainState(params={"w": np.ones(3)}, network_state={}, opt_state={})
checkpointer.save(1, state, meta={}, data=None, before=before)
checkpointer.close()
assert "orbax" not in sys.modules
"""


@pytest.mark.parametrize("mode", ["wait", "exit", "finish"])
def test_it_ends_with_the_process_that_started_it(mode, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT, tmp_path, mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: text for name, text in os.environ.items() if name != "JAX_PLATFORMS"},
    )
    pid = int(process.stdout.readline())
    if mode == "wait":
        environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"JAX_PLATFORMS=cpu" in environment  # The accelerator is the training process's.
        os.kill(pid, signal.SIGSTOP)  # So that it cannot see to it by itself.
        process.kill()
    # Both ends of its output are closed only when it has ended as well.
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == ({"wait": -9, "exit": 5, "finish": 0}[mode], "", "")
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert list_steps(tmp_path) == ([1] if mode == "finish" else [])
