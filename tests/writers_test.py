import errno
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

from haikutrain import writers
from haikutrain.errors import UsageError

# Writes steps 1 to 100 of two splits without a flush, then tears a piece and dies.
KILLED = """
import os, signal, sys
from haikutrain import writers
kind, path = sys.argv[1:]
writer = getattr(writers, kind)(path)
for step in range(1, 101):
    writer.write(step, "train", {"loss": 1 / step})
    if step % 10 == 0:
        writer.write(step, "test", {"loss": 2 / step})
names = sorted(os.listdir(path)) if os.path.isdir(path) else []
with open(os.path.join(path, names[-1]) if names else path, "ab") as file:
    file.write(b'{"step": 101, "spl')
os.kill(os.getpid(), signal.SIGKILL)
"""


def write_and_die(kind: str, path: pathlib.Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, kind, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL


def write_steps(writer: writers.MetricWriter, first: int, last: int) -> None:
    for step in range(first, last + 1):
        writer.write(step, "train", {"loss": 1 / step})
        if step % 10 == 0:
            writer.write(step, "test", {"loss": 2 / step})


def read_lines(path: pathlib.Path) -> list[dict]:
    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def read_events(directory: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing import event_accumulator

    reader = event_accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in tags}


def test_json_lines_killed_at_100_and_resumed_at_40_are_those_of_a_straight_run(tmp_path):
    straight, killed = tmp_path / "straight.jsonl", tmp_path / "killed.jsonl"
    writer = writers.JsonLines(straight)
    write_steps(writer, 1, 60)
    writer.close()
    write_and_die("JsonLines", killed)
    assert killed.read_bytes().count(b"\n") == 110
    writer = writers.JsonLines(killed, resume_step=40)
    write_steps(writer, 41, 60)
    writer.close()

    assert killed.read_bytes() == straight.read_bytes()
    steps = [line["step"] for line in read_lines(killed) if line["split"] == "train"]
    assert steps == list(range(1, 61))
    assert sorted(os.listdir(tmp_path)) == ["killed.jsonl", "straight.jsonl"]


@pytest.mark.parametrize("resume_step", [None, 0])
def test_json_lines_of_a_fresh_run_start_anew(tmp_path, resume_step):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "split": "test"}\n{"step": 7, "split": "train"}\n')
    writers.JsonLines(path, resume_step).close()
    assert path.read_bytes() == b""


def test_json_lines_drop_garbage_and_keep_every_whole_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 1, "split": "train", "loss": 0.1}\n'
    unended = b'{"step": 2, "split": "train", "loss": 0.2}'
    path.write_bytes(good + b'\0\0\n[1]\n\n{}\n\xff\xfe\n{"step": "1"}\n17\n' + unended)
    writers.JsonLines(path, resume_step=sys.maxsize).close()
    assert path.read_bytes() == good + unended + b"\n"


def test_json_lines_say_null_for_what_json_cannot_and_floats_exactly(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = writers.JsonLines(path)
    scalars = {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 0.1 + 0.2, "e": 3}
    writer.write(5, "train", scalars)
    writer.close()
    assert read_lines(path) == [
        {"step": 5, "split": "train", "a": None, "b": None, "c": None, "d": 0.1 + 0.2, "e": 3}
    ]


@pytest.mark.parametrize("name", ["step", "split"])
def test_json_lines_refuse_a_metric_with_the_name_of_a_column(tmp_path, name):
    writer = writers.JsonLines(tmp_path / "metrics.jsonl")
    with pytest.raises(UsageError, match=f"metric '{name}'"):
        writer.write(5, "train", {name: 1.0})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_json_lines_are_whole_whenever_the_cut_is_interrupted(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    old = b'{"step": 1, "split": "train"}\n{"step": 2, "split": "train"}\n'
    path.write_bytes(old)

    def crash(*_):
        raise OSError("crash")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(OSError, match="crash"):
            writers.JsonLines(path, resume_step=1)
    assert path.read_bytes() == old
    writers.JsonLines(path, resume_step=1).close()
    assert path.read_bytes() == old[: len(old) // 2]


@pytest.fixture
def limit():
    """Sets the size that no file may exceed: a "disk" that ends there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size=None: resource.setrlimit(
        resource.RLIMIT_FSIZE, (soft if size is None else size, hard)
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", ["JsonLines", "TensorBoard"])
def test_what_a_full_disk_refuses_is_kept_and_nothing_is_half_written(
    tmp_path, kind, limit, caplog
):
    path = tmp_path / "log"
    writer = getattr(writers, kind)(path)
    refused, size = 0, 0
    for step in range(1, 21):
        if step in (5, 12):  # It ends in the middle of a piece, and grows later.
            size = os.fstat(writer._file.fileno()).st_size
            limit(size + 17)
        if step in (9, 16):
            limit()
        writer.write(step, "train", {"loss": 1.0})
        if step in (5, 8, 12, 15):
            with pytest.raises(OSError, match="File too large"):
                writer.flush()
            refused += 1
            assert os.fstat(writer._file.fileno()).st_size == size
    writer.flush()
    writer.close()
    assert refused == 4
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2  # Once each time that the disk is full.
    assert all("log" in text and "cannot be written: File too large" in text for text in warnings)
    if kind == "JsonLines":
        steps = [line["step"] for line in read_lines(path)]
    else:
        steps = [step for step, _ in read_events(path)["train/loss"]]
    assert steps == list(range(1, 21))


@pytest.mark.parametrize("kind", ["JsonLines", "TensorBoard"])
def test_what_is_lost_at_the_sync_is_written_again(tmp_path, kind, monkeypatch, limit):
    writer = getattr(writers, kind)(tmp_path / "log")
    write_steps(writer, 1, 3)
    writer.flush()
    writer.sync()
    size = os.fstat(writer._file.fileno()).st_size
    write_steps(writer, 4, 6)

    def fsync(file):  # As on a network file system that is full.
        if not meanwhile:
            meanwhile.append(7)
            limit(os.fstat(file).st_size)
            write_steps(writer, 7, 7)  # The loop writes on, and is refused.
            limit()
        os.ftruncate(file, size + 5)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    meanwhile = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        for _ in range(2):
            with pytest.raises(OSError, match="Disk quota exceeded"):
                writer.sync()
            writer.flush()
        write_steps(writer, 8, 8)
    writer.close()
    if kind == "JsonLines":
        steps = [line["step"] for line in read_lines(tmp_path / "log")]
    else:
        steps = [step for step, _ in read_events(tmp_path / "log")["train/loss"]]
    assert steps == list(range(1, 9))


def test_pictures_and_texts_that_a_full_disk_refuses_are_written_later(tmp_path, limit):
    writer = writers.MediaFiles(tmp_path / "media")
    limit(100)
    writer.write_media(1, "test", {"long": "x" * 200})
    writer.write_media(2, "test", {"short": "y"})
    with pytest.raises(OSError, match="File too large"):
        writer.close()
    assert os.listdir(tmp_path / "media") == []
    limit()
    writer.close()
    written = {path.name: path.read_text() for path in (tmp_path / "media").iterdir()}
    assert written == {"test-long-1.txt": "x" * 200, "test-short-2.txt": "y"}


def test_an_unchanged_file_stays_the_one_that_another_process_appends_to(tmp_path):
    path = tmp_path / "metrics_eval.jsonl"
    first = writers.JsonLines(path, sys.maxsize)
    first.write(1, "test", {"loss": 1.0})
    second = writers.JsonLines(path, sys.maxsize)
    second.write(2, "test", {"loss": 1.0})
    first.write(3, "test", {"loss": 1.0})
    first.close()
    second.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]


def test_tensorboard_killed_at_100_and_resumed_at_40_shows_each_step_once(tmp_path):
    write_and_die("TensorBoard", tmp_path)
    assert len(read_events(tmp_path)["train/loss"]) == 100

    writer = writers.TensorBoard(tmp_path, resume_step=40)
    write_steps(writer, 41, 60)
    writer.flush()  # Killed again here: this one is never closed.
    again = writers.TensorBoard(tmp_path, resume_step=50)
    write_steps(again, 51, 70)
    again.close()

    shown = read_events(tmp_path)
    assert [step for step, _ in shown["train/loss"]] == list(range(1, 71))
    assert [step for step, _ in shown["test/loss"]] == [10, 20, 30, 40, 50, 60, 70]
    assert shown["train/loss"][49][1] == pytest.approx(1 / 50, rel=1e-6)
    writer.close()


@pytest.mark.parametrize("resume_step", [None, 0])
def test_tensorboard_of_a_fresh_run_forgets_an_older_one(tmp_path, resume_step):
    old = writers.TensorBoard(tmp_path)
    old.write(0, "train", {"loss": 9.0, "gone": 1.0})
    old.write(3, "train", {"loss": 9.0})
    old.close()
    new = writers.TensorBoard(tmp_path, resume_step)
    new.write(1, "train", {"loss": 5.0})
    new.close()
    assert read_events(tmp_path)["train/loss"] == [(1, 5.0)]


def test_tensorboard_reads_files_as_they_were_started_even_if_the_clock_goes_back(
    tmp_path, monkeypatch
):
    for now, loss in ((2_000_000_000.0, 1.0), (2_000_000_000.5, 2.0), (1_900_000_000.0, 3.0)):
        monkeypatch.setattr(writers, "time", types.SimpleNamespace(time=lambda now=now: now))
        writer = writers.TensorBoard(tmp_path)
        writer.write(1, "train", {"loss": loss})
        writer.close()
    assert len(os.listdir(tmp_path)) == 3
    assert read_events(tmp_path)["train/loss"] == [(1, 3.0)]


def test_tensorboard_takes_any_number(tmp_path):
    writer = writers.TensorBoard(tmp_path)
    writer.write(1, "train", {"nan": float("nan"), "huge": 1e300, "count": 3})
    writer.close()
    writer.close()
    shown = read_events(tmp_path)
    assert shown["train/count"] == [(1, 3.0)]
    assert shown["train/huge"] == [(1, float("inf"))]
    assert np.isnan(shown["train/nan"][0][1])


def test_an_error_in_one_writer_keeps_nothing_from_the_others(tmp_path):
    class Broken:
        def write(self, step, split, scalars):
            raise OSError("no space")

        def flush(self):
            raise KeyboardInterrupt

        def close(self):
            raise OSError("still none")

    first, last = tmp_path / "first.jsonl", tmp_path / "last.jsonl"
    parts = [writers.JsonLines(first), Broken(), Broken(), writers.JsonLines(last)]
    all_writers = writers.Writers(parts)
    with pytest.raises(OSError, match="no space"):
        all_writers.write(1, "train", {"loss": 1.0})
    with pytest.raises(KeyboardInterrupt):
        all_writers.flush()
    with pytest.raises(OSError, match="still none") as caught:
        all_writers.close()
    assert caught.value.__notes__ == ["and in Broken: OSError('still none')"]
    assert read_lines(first) == read_lines(last) == [{"step": 1, "split": "train", "loss": 1.0}]
    assert [parts[i]._file.closed for i in (0, 3)] == [True, True]
