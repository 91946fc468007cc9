"""Mistakes in what an experiment's methods return, in one line each; and a workdir in use."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haikutrain
from haikutrain import UsageError, main


@pytest.fixture
def config(tiny):
    made = tiny.get_config()
    made.num_steps, made.batch_size = 4, 8
    return made


def train(kind, config, tmp_path):
    return haikutrain.train(kind(config), tmp_path / "run")


RETURNS = {
    "hooks": (lambda self: print, "hooks returned <built-in"),
    "optimizer": (lambda self: optax.sgd, r"optimizer returned <function sgd.*optax\.adam"),
    "eval_data": (lambda self: {"x": np.ones(3)}, "dict of arrays.*ArrayDataset"),
}


@pytest.mark.parametrize("method", RETURNS)
def test_what_a_method_may_not_return_is_said_before_anything_is_written(
    method, tiny, config, tmp_path
):
    returned, message = RETURNS[method]
    kind = type("Wrong", (tiny.Tiny,), {method: returned})
    with pytest.raises(UsageError, match=message):
        train(kind, config, tmp_path)
    assert not (tmp_path / "run").exists()


def test_split_names_and_texts_as_metrics(tiny, config, tmp_path):
    class Numbered(tiny.Tiny):
        def eval_data(self):
            return {1: haikutrain.ArrayDataset(tiny.arrays(), 8)}

    class Word(tiny.Tiny):
        def loss(self, batch, is_training):
            return super().loss(batch, is_training)[0], {"name": "tiny"}

    class Text(tiny.Tiny):
        def train_data(self):
            arrays = {**tiny.arrays(examples=8), "word": np.array(["a"] * 8)}
            return type("Words", (), {"batch": lambda self, step, rows=None: arrays})()

    with pytest.raises(UsageError, match=r"splits named \[1\]; names must be strings"):
        train(Numbered, config, tmp_path)
    with pytest.raises(UsageError, match="'name' is 'tiny'; metrics are arrays"):
        train(Word, config, tmp_path)
    with pytest.raises(UsageError, match="gave 'word' of dtype <U1; batches are of numbers"):
        train(Text, config, tmp_path)
    with pytest.raises(UsageError, match="is no experiment; make one of its class and a config"):
        haikutrain.train(tiny.Tiny, tmp_path / "run")


def test_averaged_weights_that_evaluation_would_ignore_are_refused(tiny, config, tmp_path):
    class Ignoring(tiny.Tiny):
        def evaluate(self, state, batch, rngs):
            return {"one": jnp.ones(batch["id"].shape)}

    config.ema_decay = 0.9
    with pytest.raises(UsageError, match=r"ema_decay=0.9 would do nothing: Ignoring.evaluate"):
        train(Ignoring, config, tmp_path)


def test_a_last_evaluation_that_fails_loses_no_training(tiny, config, tmp_path):
    class Failing(tiny.Tiny):
        def report(self, state, split, rows):
            raise ZeroDivisionError("in report")

    config.eval_every = None
    config.checkpoint_every = 100
    with pytest.raises(ZeroDivisionError, match="in report"):
        train(Failing, config, tmp_path)
    assert int(haikutrain.restore(Failing(config), tmp_path / "run").step) == 4


def test_a_split_without_rows_is_refused(tiny, config, tmp_path):
    class Empty(tiny.Tiny):
        def eval_data(self):
            none = {name: array[:0] for name, array in tiny.arrays().items()}
            return {"void": [none]}

    with pytest.raises(UsageError, match=r"eval_data \('void'\) has no rows"):
        train(Empty, config, tmp_path)


def test_a_second_trainer_is_refused_and_the_lock_ends_with_the_first(
    configs, tmp_path, log_lines, capsys
):
    workdir = tmp_path / "run"
    flags = [f"--config={configs / 'tiny.py'}", f"--workdir={workdir}"]
    command = [sys.executable, "-m", "haikutrain.main", *flags, "--cpu_devices=4"]
    with subprocess.Popen(
        [*command, "--config.hold_at=14"], stderr=subprocess.PIPE, text=True
    ) as first:
        try:
            while "step 12/24" not in first.stderr.readline():
                assert first.poll() is None
            before = json.loads((workdir / "config.json").read_text())
            assert main.run(flags) == 2
            error = capsys.readouterr().err
            assert f"is in use by process {first.pid} on {os.uname().nodename}" in error
            assert main.run([*flags, "--mode=eval"]) == 0  # Reading is free.
            assert json.loads((workdir / "config.json").read_text()) == before
        finally:
            first.kill()  # Else its end would be waited for.
    assert main.run(flags) == 0
    assert [line["step"] for line in log_lines(workdir)] == list(range(4, 25, 4))


def test_a_damaged_checkpoint_is_one_line(tiny, config, configs, tmp_path, capsys):
    flags = [f"--config={configs / 'tiny.py'}", f"--workdir={tmp_path}"]
    assert main.run([*flags, "--config.stop_after=6"]) == 0
    (tmp_path / "checkpoints/6").rename(tmp_path / "checkpoints/7")
    capsys.readouterr()
    assert main.run(flags) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "checkpoints/7" in line
    assert "move that folder away" in line
