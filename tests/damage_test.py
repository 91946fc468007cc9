"""Damage to checkpoints: the newest good one is used, in words, and never a wrong value."""

import errno
import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest

import haikutrain
from haikutrain import checkpoint_folder, inspect, main
from haikutrain import start as starts
from haikutrain.checkpoint import Checkpointer, digest
from haikutrain.errors import CheckpointDamaged, CheckpointUnreadable, UsageError
from haikutrain.train_state import TrainState


def make_state(step):
    return TrainState(
        params={"linear": {"w": jnp.full(600, step / 8)}},  # Stored as it is, not in an index.
        network_state={},
        opt_state=(jnp.int32(step),),
        step=jnp.int32(step),
        rng=jax.random.PRNGKey(step),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with good checkpoints of steps 5, 10 and 15."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpointer = Checkpointer(directory)
    for step in (5, 10, 15):
        meta, metrics = {"window": [0.5, step]}, {"accuracy": step / 20}
        data = {"next": 1000 + step}
        checkpointer.save(step, make_state(step), meta=meta, data=data, metrics=metrics)
    checkpointer.close()
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    """A copy of it."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


def files(folder):
    """Every file of a checkpoint, relative to it."""
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def flip(path, bit=None):
    content = bytearray(path.read_bytes())
    if content:
        bit = 8 * (len(content) // 2) + 3 if bit is None else bit
        content[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(bytes(content))


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


DAMAGES = [flip, truncate, empty, os.remove]


def own_warnings(caplog):
    """Not Orbax's, which misses a file or two that it does not need."""
    texts = [(record.pathname, record.getMessage()) for record in caplog.records]
    return [text for path, text in texts if "/orbax/" not in path]


def newest(directory, *, read_only=False, **kwargs):
    """The step and what is restored of the newest good checkpoint."""
    checkpointer = Checkpointer(directory, read_only=read_only, **kwargs)
    target = jax.eval_shape(lambda: make_state(0))
    try:
        found = checkpointer.newest_good(lambda step: (step, checkpointer.restore(step, target)))
    finally:
        checkpointer.close()
    return found


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_whatever_is_damaged_the_values_are_those_of_a_good_step(saved, tmp_path, damage, caplog):
    passed_over = []
    names = files(saved / "15")
    assert {name.parts[0] for name in names} >= {
        *("params", "opt_state", "step", "rng", "data", "meta", "checksums")
    }
    for name in names:
        directory = shutil.copytree(saved, tmp_path / "checkpoints")
        damage(directory / "15" / name)
        caplog.clear()
        step, restored = newest(directory)
        if step == 10:
            passed_over.append(name.parts[0])
            (warning,) = own_warnings(caplog)
            assert f"checkpoint {directory / '15'} is damaged: item {name.parts[0]}: " in warning
            assert f"moved to {directory / '.damaged' / '15'}; going on from step 10" in warning
            assert sorted(os.listdir(directory)) == [".damaged", "10", "5"]
        else:  # A file, or a part of one, that does not matter.
            assert step == 15
            assert own_warnings(caplog) == []
            assert sorted(os.listdir(directory)) == ["10", "15", "5"]
        assert digest(restored.state) == digest(make_state(step))
        assert restored.data == {"next": 1000 + step}
        assert restored.meta["window"] == [0.5, step]
        shutil.rmtree(directory)
    assert set(passed_over) == {"params", "opt_state", "step", "rng", "data", "meta", "checksums"}


@pytest.mark.parametrize("item", ["params", "opt_state", "step", "data", "meta", "checksums"])
def test_a_missing_item_is_damage(directory, item, caplog):
    shutil.rmtree(directory / "15" / item)
    step, restored = newest(directory)
    assert (step, digest(restored.state)) == (10, digest(make_state(10)))
    (warning,) = own_warnings(caplog)
    assert f"15 is damaged: item {item}: " in warning


def make_folder(path):
    path.mkdir()


def make_full_folder(path):
    (path / "params" / "d").mkdir(parents=True)


def make_file(path):
    path.write_text("")


def make_copy(path):
    shutil.copytree(path.parent / "10", path)


@pytest.mark.parametrize("make", [make_folder, make_full_folder, make_file, make_copy])
def test_what_has_a_steps_name_and_is_no_checkpoint_is_moved_away(directory, make, caplog):
    for step in ("7", "20"):
        if step == "20" or make is not make_copy:
            make(directory / step)
    (directory / "notes").mkdir()
    step, restored = newest(directory)
    assert (step, digest(restored.state)) == (15, digest(make_state(15)))
    kept = {"5", "10", "15", "notes", ".damaged"}
    assert set(os.listdir(directory)) == kept
    assert "20" in os.listdir(directory / ".damaged")
    assert f"{directory / '20'} is damaged: item " in caplog.text
    assert f"{directory / 'notes'} is no checkpoint; it is left where it is" in caplog.text
    # The step can be saved now; what was moved neither counts nor goes.
    checkpointer = Checkpointer(directory, keep=3)
    checkpointer.save(20, make_state(20), meta={}, data=None)
    checkpointer.close()
    assert checkpointer.steps() == [10, 15, 20]
    assert "20" in os.listdir(directory / ".damaged")
    # Damaged again, it gets another name there.
    empty(directory / "20" / "meta" / "metadata")
    assert newest(directory)[0] == 15
    assert {"20", "20-2"} <= set(os.listdir(directory / ".damaged"))


def test_several_are_passed_over_and_all_of_them_are_named(directory, caplog):
    truncate(directory / "15" / "data" / "metadata")
    os.remove(directory / "10" / "params" / "_METADATA")
    assert newest(directory)[0] == 5
    warnings = own_warnings(caplog)
    assert ["checkpoints/10 is damaged: item params" in text for text in warnings] == [True, False]
    assert ["checkpoints/15 is damaged: item data" in text for text in warnings] == [False, True]
    assert sorted(os.listdir(directory / ".damaged")) == ["10", "15"]


@pytest.mark.parametrize("kind", ["damaged", "stray"])
def test_without_a_good_one_it_is_an_error_and_nothing_is_moved(directory, kind):
    for step in ("5", "10", "15"):
        if kind == "damaged":
            flip(directory / step / "checksums" / "metadata")
        else:
            shutil.rmtree(directory / step / "checksums")
            shutil.rmtree(directory / step / "meta")
    with pytest.raises(CheckpointDamaged) as error:
        newest(directory)
    assert f"{directory / '15'} is damaged: item checksums: " in str(error.value)
    assert "as are those of 5, 10; there is no good one" in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(os.listdir(directory)) == ["10", "15", "5"]


def test_readers_pass_over_without_moving_and_best_is_never_a_damaged_one(directory, caplog):
    best = {"best_metric": "accuracy", "best_mode": "max"}
    assert Checkpointer(directory, read_only=True, **best).best_step() == 15
    flip(directory / "15" / "meta" / "metadata")
    assert newest(directory, read_only=True)[0] == 10
    assert "15 is damaged: item meta" in caplog.text
    assert "passed over for step 10" in caplog.text
    assert sorted(os.listdir(directory)) == ["10", "15", "5"]
    assert Checkpointer(directory, read_only=True, **best).best_step() == 10


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE])
def test_what_cannot_be_read_now_is_not_damage_and_stays(directory, code, monkeypatch):
    original = pathlib.Path.read_text

    def read_text(path, *args, **kwargs):
        if path.parts[-3:] == ("15", "meta", "metadata"):
            raise OSError(code, os.strerror(code))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(pathlib.Path, "read_text", read_text)
    with pytest.raises(CheckpointUnreadable, match=rf"15 .*item meta: {os.strerror(code)}"):
        newest(directory)
    monkeypatch.undo()
    assert newest(directory)[0] == 15
    assert sorted(os.listdir(directory)) == ["10", "15", "5"]


@pytest.mark.parametrize("closed", ["15", "15/params", "15/checksums/metadata", "", "arrays"])
def test_a_folder_that_may_not_be_entered_is_not_damage(directory, closed, tmp_path):
    for path in (*tmp_path.parents, tmp_path):
        if path.stat().st_uid == 0 and str(path).startswith("/tmp/"):
            path.chmod(0o755)
    if closed == "arrays":  # Read by Orbax, whose errors have a form of their own.
        arrays = max(directory.glob("15/params/**/d/*"), key=lambda path: path.stat().st_size)
        closed = arrays.relative_to(directory)
    (directory / closed).chmod(0)
    user = os.geteuid()
    if user == 0:  # Whom nothing is denied.
        os.seteuid(65534)
    try:
        with pytest.raises(CheckpointUnreadable, match=r"cannot be read: .*Permission denied"):
            newest(directory, read_only=True)
    finally:
        os.seteuid(user)
    (directory / closed).chmod(0o755)
    assert newest(directory)[0] == 15


def test_another_format_is_no_damage(directory, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "FORMAT", 2)
    with pytest.raises(UsageError, match="is in format 1, and this version of haikutrain reads"):
        newest(directory)
    assert sorted(os.listdir(directory)) == ["10", "15", "5"]


def test_a_reader_finds_the_newer_one_if_the_trainer_deletes_what_it_reads(directory):
    checkpointer = Checkpointer(directory, read_only=True)
    asked = []

    def read(step):
        asked.append(step)
        if step == 15:
            for old in ("5", "10", "15"):
                (directory / old).rename(directory / f".{old}")
            shutil.copytree(directory / ".15", directory / "20")
            return checkpointer.read(step)
        return step

    assert checkpointer.newest_good(read) == 20
    assert asked == [15, 20]


# --- a run -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tiny, tmp_path_factory):
    """A run of 24 steps stopped after 18, with checkpoints of 6, 12 and 18."""
    workdir = tmp_path_factory.mktemp("stopped")
    train(tiny, workdir, stop_after=18)
    return workdir


def experiment(tiny, **fields):
    config = tiny.get_config()
    config.log_every = 1
    config.update(fields)
    return tiny.Tiny(config)


def train(tiny, workdir, **fields):
    return haikutrain.train(experiment(tiny, **fields), workdir)


def test_a_run_goes_on_from_the_newest_good_step_as_if_nothing_had_happened(
    tiny, stopped, tmp_path, log_lines, caplog
):
    straight, damaged = tmp_path / "straight", tmp_path / "damaged"
    train(tiny, straight)
    shutil.copytree(stopped, damaged)
    flip(damaged / "checkpoints" / "18" / "rng" / "_METADATA")
    os.remove(damaged / "checkpoints" / "18" / "data" / "metadata")
    assert [line["step"] for line in log_lines(damaged)] == list(range(1, 19))
    train(tiny, damaged)
    assert "checkpoints/18 is damaged: item data: No such file or directory; moved" in caplog.text
    assert "going on from step 12" in caplog.text
    for split in ("train", "test", "few"):
        assert log_lines(damaged, split) == log_lines(straight, split)
    states = [
        Checkpointer(workdir / "checkpoints", read_only=True).read(24).state
        for workdir in (damaged, straight)
    ]
    assert digest(states[0]) == digest(states[1])
    assert sorted(os.listdir(damaged / "checkpoints")) == [".damaged", "12", "18", "24"]


def test_a_run_without_a_good_checkpoint_is_not_begun_anew(tiny, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    for step in (6, 12, 18):
        empty(tmp_path / "run" / "checkpoints" / str(step) / "checksums" / "metadata")
    before = sorted((tmp_path / "run").rglob("*"))
    log = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointDamaged, match="there is no good one to go on from"):
        train(tiny, tmp_path / "run")
    assert sorted((tmp_path / "run").rglob("*")) == before
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == log


def test_a_mismatch_is_a_mistake_and_no_damage(tiny, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    flip(tmp_path / "run" / "checkpoints" / "18" / "meta" / "metadata")
    with pytest.raises(UsageError, match="batch_size"):
        train(tiny, tmp_path / "run", batch_size=8)
    with pytest.raises(UsageError, match="does not fit the experiment"):
        train(tiny, tmp_path / "run", net="conv")
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["12", "18", "6"]


@pytest.mark.parametrize("only", ["all", "weights"])
def test_another_runs_newest_good_checkpoint_is_taken_and_left_as_it_is(
    tiny, stopped, tmp_path, only, caplog
):
    shutil.copytree(stopped, tmp_path / "source")
    flip(tmp_path / "source" / "checkpoints" / "18" / "meta" / "metadata")
    fields = {"restore_from": str(tmp_path / "source"), "restore_only": only}
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints")
    begun = starts.restore_or_init(starts.Task(experiment(tiny, **fields)), checkpointer)
    assert begun.step == (12 if only == "all" else 0)
    assert "checkpoints/18 is damaged: item meta" in caplog.text
    assert sorted(os.listdir(tmp_path / "source" / "checkpoints")) == ["12", "18", "6"]
    fields["restore_from"] = str(tmp_path / "source" / "checkpoints" / "18")
    with pytest.raises(CheckpointDamaged, match="item meta"):
        starts.restore_or_init(starts.Task(experiment(tiny, **fields)), checkpointer)


def test_eval_and_inspect_pass_over_latest_and_refuse_by_number(
    configs, tiny, stopped, tmp_path, capsys, caplog
):
    shutil.copytree(stopped, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    expected = digest(Checkpointer(checkpoints, read_only=True).read(12).state)
    truncate(max(checkpoints.glob("18/params/**/d/*"), key=lambda path: path.stat().st_size))
    before = sorted(checkpoints.rglob("*"))
    flags = [f"--config={configs / 'tiny.py'}", f"--workdir={tmp_path / 'run'}", "--mode=eval"]
    assert main.run(flags) == 0
    line = (tmp_path / "run" / "metrics_eval.jsonl").read_text().splitlines()[-1]
    assert json.loads(line)["step"] == 12
    capsys.readouterr()
    assert inspect.main([str(tmp_path / "run"), "--digest"]) == 0
    assert capsys.readouterr().out == expected + "\n"
    assert caplog.text.count("18 is damaged: item params") == 2
    assert main.run([*flags, "--checkpoint=18"]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert "checkpoints/18 is damaged: item params" in error
    assert inspect.main([str(tmp_path / "run"), "--digest", "--step=18"]) == 2
    assert sorted(checkpoints.rglob("*")) == before


def test_nothing_but_words_is_printed_of_damage(command, configs, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints" / "18" / "params").rglob("manifest.ocdbt"):
        truncate(path)
    flags = [f"--config={configs}/tiny.py", f"--workdir={tmp_path / 'run'}", "--cpu_devices=4"]
    done = command(
        "-m", "haikutrain.main", *flags, "--config.log_every=1", "--config.stop_after=13"
    )
    warnings = [line for line in done.stderr.splitlines() if "damaged" in line]
    assert len(warnings) == 1
    assert "checkpoints/18 is damaged: item params: " in warnings[0]
    assert "Traceback" not in done.stderr
    assert "resuming at step 12" in done.stderr


LATE = """
from haikutrain import checkpoint_store

class Late:
    def __init__(self, text):
        self.text = text

    def __del__(self):
        raise RuntimeError(self.text)

checkpoint_store._quiet()
Late("Event loop is closed")
Late("something else")
"""


def test_reads_that_end_after_the_first_that_failed_are_not_heard_of(command):
    # Orbax abandons its other reads when one fails; they then find its event loop closed.
    said = command("-c", LATE).stderr
    assert "something else" in said
    assert "Event loop" not in said
