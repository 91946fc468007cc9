"""The inspect command: what it shows, its digest, its mistakes."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from haikutrain import inspect
from haikutrain.checkpoint import Checkpointer, digest
from haikutrain.train_state import TrainState

ROOT = pathlib.Path(__file__).parent.parent


def make_state(step):
    return TrainState(
        params={"conv/~/a": {"w": jnp.ones((3, 4)), "b": jnp.zeros(5, jnp.bfloat16)}},
        network_state={},
        opt_state=(jnp.int32(1),),
        step=jnp.int32(step),
        rng=jax.random.key(0),
    )


@pytest.fixture
def workdir(tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    checkpointer = Checkpointer(directory)
    for step in (10, 20):
        meta = {"experiment": "digits:Digits", "ended": step == 20}
        metrics = {"test/accuracy": step / 40}
        checkpointer.save(step, make_state(step), meta=meta, data={"next": step}, metrics=metrics)
    checkpointer.close()
    # Marked-up text to rich, if nobody looks.
    return directory.parent.rename(tmp_path / "run [bold]")


def listing(path):
    return sorted((str(p), p.stat().st_mtime_ns) for p in path.rglob("*"))


def test_it_shows_steps_tree_bytes_and_meta(workdir, capsys):
    before = listing(workdir)
    assert inspect.main([str(workdir)]) == 0
    out = capsys.readouterr().out
    assert listing(workdir) == before
    lines = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert str(workdir / "checkpoints") in lines
    assert any(line.startswith("10 ") and "test/accuracy 0.25" in line for line in lines)
    assert any(line.startswith("20 * ") and "test/accuracy 0.5" in line for line in lines)
    for line in (
        "params 2 leaves 58 B",  # 12 float32 and 5 bfloat16
        "params/conv/~/a/w float32[3,4] 48 B",
        "params/conv/~/a/b bfloat16[5] 10 B",
        "network_state 0 leaves 0 B",
        "step int32[] 4 B",
        "rng key<threefry2x32>[] 8 B",
        "17 parameters; 74 B in all",
        "experiment: digits:Digits",
        "ended: True",
        "data position: {'next': 20}",
    ):
        assert line in lines


def test_the_digest_is_that_of_the_state_by_whatever_path(workdir, capsys):
    directory = workdir / "checkpoints"
    for args, step in (
        ([workdir], 20),
        ([directory], 20),
        ([workdir, "--step=10"], 10),
        ([directory / "10"], 10),
    ):
        assert inspect.main([*map(str, args), "--digest"]) == 0
        assert capsys.readouterr().out == digest(make_state(step)) + "\n"
    assert digest(make_state(10)) != digest(make_state(20))


def test_mistakes_are_one_line_and_exit_code_2(workdir, capsys):
    damaged = workdir / "checkpoints" / "10" / "meta" / "metadata"
    damaged.write_text(damaged.read_text().replace("false", "true "))
    for args, message in (
        ([workdir / "absent"], "holds no checkpoint"),
        ([workdir, "--step=15"], "has no checkpoint of step 15; it has: 10, 20"),
        ([workdir / "checkpoints" / "10", "--step=20"], "leave one of them out"),
        ([workdir, "--step=10"], "is damaged: item meta"),
        ([workdir, "--step=x"], "--step"),
        ([], "path"),
    ):
        try:
            code = inspect.main([*map(str, args)])
        except SystemExit as error:
            code = error.code
        err = capsys.readouterr().err
        assert code == 2
        assert err.count("\n") == 1
        assert message in err
    assert inspect.main([str(workdir)]) == 0
    assert "(damaged)" in capsys.readouterr().out


def test_the_command_runs_alone(workdir):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", "haikutrain.inspect", str(workdir), "--digest"],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == digest(make_state(20)) + "\n"
