"""The command line: every mistake that needs no training is one line and exit code 2."""

import pathlib
import subprocess
import sys
import types

import pytest

from haikutrain import loop, main

CONFIG = """
from haikutrain.config import base_config

def get_config(variant="plain"):
    config = base_config()
    config.experiment = ":Toy"
    config.num_steps = 100
    config.batch_size = 8
    config.learning_rate = 0.5
    config.augment = False
    config.model = {"width": 32}
    return config

class Toy:
    def __init__(self, config):
        self.config = config
    def init(self, rngs, batch): ...
    def update(self, state, batch, rngs): ...
    def evaluate(self, state, batch, rngs): ...
    def train_data(self): ...
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The path of a config file, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(CONFIG)
    return "toy.py"


@pytest.fixture
def calls(monkeypatch):
    """What `main` asked of the loops, which do nothing here."""
    calls = []

    def train(experiment, workdir, *, overrides):
        calls.append(("train", experiment.config, workdir, overrides))
        stop = experiment.config.stop_after or experiment.config.num_steps
        return types.SimpleNamespace(step=stop)

    def evaluate(experiment, workdir, checkpoint, *, predictions):
        calls.append(("evaluate", checkpoint, workdir, predictions))
        return {"test": {"accuracy": 0.98765432, "loss": 1.5}}

    monkeypatch.setattr(loop, "train", train)
    monkeypatch.setattr(loop, "evaluate", evaluate)
    return calls


@pytest.mark.parametrize(
    "argv, expected",
    [
        ([], ["no config file", "--config=FILE.py"]),
        (["--config="], ["no config file"]),
        (["--config"], ["--config"]),
        (["--config=missing.py"], ["missing.py", "No such file"]),
        (["--config=toy.py", "--config=toy.py"], ["--config"]),
        (["--config=toy.py", "--mode=tune"], ["--mode=tune", "train|eval"]),
        (["--config=toy.py", "extra"], ["unexpected argument 'extra'"]),
        (["extra", "--config=toy.py"], ["unexpected argument 'extra'"]),
        (["--config=toy.py", "extra", "--mode=tune"], ["--mode=tune", "train|eval"]),
        (["--config=toy.py", "--", "--mode=eval"], ["unexpected argument '--mode=eval'"]),
        (["--config=toy.py", "--wrokdir=x"], ["unknown flag --wrokdir", "--workdir?"]),
        (["--config=toy.py", "--num_steps=3"], ["unknown flag", "--config.num_steps=VALUE"]),
        (["--config=toy.py", "--zzz"], ["unknown flag --zzz", "--help"]),
        (["--config=toy.py", "--cpu_devices=two"], ["--cpu_devices=two"]),
        (["--config=toy.py", "--checkpoint=best"], ["--checkpoint=best", "add --mode=eval"]),
        (["--config=toy.py", "--predictions=p.npz"], ["--predictions=p.npz", "add --mode=eval"]),
        (["--config=toy.py", "--mode=eval", "--checkpoint=new"], ["--checkpoint=new", "step"]),
        (["--config=toy.py", "--mode=eval", "--checkpoint=-3"], ["--checkpoint=-3", "step"]),
        (["--config=toy.py", "--flagfile=missing"], ["missing"]),
        (["--config=toy.py", "--config.model.widht=3"], ["'widht' in 'model'", "'width'"]),
        (["--config.num_stpes=3", "--config=toy.py"], ["'num_stpes'", "'num_steps'"]),
        (["--config=toy.py", "--config.batch_size", "x"], ["batch_size", "an int", "'x'"]),
        (["--config=toy.py", "--config.batch_size=0"], ["config.batch_size=0", "1 or more"]),
        (["--config=toy.py", "--config.batch_size", "-8"], ["batch_size=-8", "1 or more"]),
        (["--config=toy.py", "--config.seed", "--mode=eval"], ["give 'seed' a value"]),
        (["--config=toy.py", "--config.steps_per_call=8"], ["=8", "num_steps=100"]),
        (["--config=toy.py", "--config.experiment=:Top"], ["no class 'Top'", "'Toy'"]),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(toy, calls, capsys, argv, expected):
    assert main.run(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("haikutrain: error: ")
    assert err.count("\n") == 1
    for part in expected:
        assert part in err
    assert calls == []


def test_training_gets_the_config_and_says_how_to_go_on(toy, calls, capsys):
    argv = [f"--config={toy}:big", "--config.model.width", "64", "--config.augment"]
    assert main.run([*argv, "--config.stop_after=50", "--workdir=my run"]) == 0
    (_, config, workdir, overrides), *more = calls
    assert overrides == [
        "--config.model.width=64",
        "--config.augment",
        "--config.stop_after=50",
    ]
    assert (config.model.width, config.augment, config.stop_after) == (64, True, 50)
    assert (workdir, more) == ("my run", [])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "checkpoints: my run/checkpoints",
        "metrics:     my run/metrics.jsonl",
        "curves:      tensorboard --logdir 'my run/tensorboard'",
        "stopped at step 50 of 100; to resume:",
        "    python -m haikutrain.main --config=toy.py:big --config.model.width 64 "
        "--config.augment --config.stop_after=50 '--workdir=my run' --config.stop_after=100",
    ]
    # The command works as printed: the last stop_after wins.
    assert main.run([*argv, "--config.stop_after=50", "--config.stop_after=100"]) == 0
    assert calls[1][1].stop_after == 100
    assert calls[1][2] == "runs/toy-big"
    assert "--config.num_steps=200" in capsys.readouterr().out


def test_flagfile_holds_overrides_too(toy, calls, tmp_path):
    (tmp_path / "flags.txt").write_text("--config.num_steps=300\n--workdir=there\n")
    assert main.run([f"--config={toy}", "--flagfile=flags.txt"]) == 0
    assert calls[0][1].num_steps == 300
    assert calls[0][2] == "there"


@pytest.mark.parametrize(
    "flags, checkpoint",
    [([], "latest"), (["--checkpoint=best"], "best"), (["--checkpoint=40"], 40)],
)
def test_evaluation_prints_a_line_for_each_number(toy, calls, capsys, flags, checkpoint):
    assert main.run([f"--config={toy}", "--mode=eval", *flags]) == 0
    assert calls == [("evaluate", checkpoint, "runs/toy", None)]
    assert capsys.readouterr().out == "test accuracy 0.987654\ntest loss 1.5\n"


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt(), 130), (SystemExit(42), 42)])
def test_other_ends_have_their_exit_codes(toy, monkeypatch, error, code):
    def train(experiment, workdir, *, overrides):
        raise error

    monkeypatch.setattr(loop, "train", train)
    assert main.run([f"--config={toy}"]) == code


def test_programming_error_keeps_its_type(toy, monkeypatch):
    def train(experiment, workdir, *, overrides):
        raise ZeroDivisionError("mine")

    monkeypatch.setattr(loop, "train", train)
    with pytest.raises(ZeroDivisionError, match="mine"):
        main.run([f"--config={toy}"])


# --- as a process ----------------------------------------------------------------------------


def _process(*argv: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "haikutrain.main", *argv]
    repository = pathlib.Path(main.__file__).parents[1]
    return subprocess.run(
        command, cwd=repository, capture_output=True, text=True, timeout=60, check=False
    )


def test_process_help_shows_the_flags_and_exits_0():
    done = _process("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for flag in ("--config", "--workdir", "--mode", "--cpu_devices", "--checkpoint"):
        assert f"  {flag}" in done.stdout


def test_process_simulates_devices_before_the_config_file_starts_jax(tmp_path):
    starts_jax = "import jax.numpy as jnp\nONE = jnp.ones(())\n"
    (tmp_path / "early.py").write_text(starts_jax + CONFIG)
    done = _process(f"--config={tmp_path}/early.py", "--cpu_devices=4", "--config.batch_size=6")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "haikutrain: error: config.batch_size=6: the 4 devices share a batch equally, so 4 must "
        "divide it; 8 would do\n"
    )


def test_process_shows_the_users_log_and_traceback_but_not_the_libraries_reports(tmp_path):
    broken = """
        logging.info("of mine")
        log = logging.get_absl_logger()
        for level, text in [(20, "of jax"), (30, "warned")]:
            log.handle(log.makeRecord("absl", level, jax.__file__, 1, text, (), None))
        1 / 0
"""
    source = "import jax\nfrom absl import logging\n" + CONFIG.replace(
        "\n        self.config = config\n", broken
    )
    (tmp_path / "broken.py").write_text(source)
    done = _process(f"--config={tmp_path}/broken.py", "--cpu_devices=1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "broken.py" in done.stderr
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
    assert "of mine\n" in done.stderr
    assert "] warned\n" in done.stderr
    assert "of jax\n" not in done.stderr
