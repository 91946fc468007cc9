"""What all tests share: four simulated devices, one compilation cache, the command itself."""

import gc
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

CACHE = pathlib.Path(tempfile.gettempdir()) / "haikutrain-tests-compiled"

# Before JAX is imported anywhere: subprocesses inherit it.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["JAX_PLATFORMS"] = "cpu"

from haikutrain import devices  # noqa: E402

devices.simulate(4)

CONFIGS = pathlib.Path(__file__).parent / "configs"


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Lets go of a file's compiled programs: each has memory maps, of which a process has 65,530.

    Where they run out XLA ends the process with a segmentation fault.
    """
    yield
    import jax

    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def configs() -> pathlib.Path:
    """The folder of the tests' config files."""
    return CONFIGS


@pytest.fixture(scope="session")
def tiny():
    """The module `configs/tiny.py`."""
    spec = importlib.util.spec_from_file_location("tiny", CONFIGS / "tiny.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def command():
    """Runs `python -m ...` as a user would; returns the finished process, output as text."""

    def run(*args, check=True, timeout=240, **kwargs):
        done = subprocess.run(
            [sys.executable, *map(str, args)],
            capture_output=True,
            text=True,
            timeout=timeout,
            **kwargs,
        )
        assert not check or done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def main(command):
    """Runs `python -m haikutrain.main` with these flags."""
    return lambda *flags, **kwargs: command("-m", "haikutrain.main", *flags, **kwargs)


@pytest.fixture(scope="session")
def digest(command):
    """The digest of a checkpoint, as the command says it."""

    def run(path, *flags):
        return command("-m", "haikutrain.inspect", path, "--digest", *flags).stdout.strip()

    return run


@pytest.fixture(scope="session")
def log_lines():
    """The lines of a run's `metrics.jsonl` of one split, without the two speeds."""

    def read(workdir, split="train"):
        text = (pathlib.Path(workdir) / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        speeds = ("steps_per_second", "examples_per_second")
        return [
            {name: value for name, value in line.items() if name not in speeds}
            for line in lines
            if line["split"] == split
        ]

    return read


@pytest.fixture(scope="session")
def drive():
    """Runs an experiment's own programs without the loop.

    Returns a copy of the state at 0 and after each call of the update, and each call's metrics,
    summed over its steps.
    """
    import numpy as np

    from haikutrain.feed import TrainFeed
    from haikutrain.metrics import empty_window
    from haikutrain.programs import Programs

    def run(experiment, steps, per_call=1):
        feed = TrainFeed(experiment.train_data(), experiment.config.batch_size)
        programs = Programs(experiment, feed.first)
        names = programs.metric_names
        state = programs.init()
        states, metrics = [devices.snapshot(state)], []
        with feed.items(((s, per_call) for s in range(0, steps, per_call)), None) as items:
            for item in items:
                zeros = devices.place(empty_window(names))
                state, sums = programs.update(state, zeros, item)
                states.append(devices.snapshot(state))
                metrics.append(
                    dict(zip(names, np.asarray(sums)[: len(names)].tolist(), strict=True))
                )
        return states, metrics

    return run


@pytest.fixture
def run_plain(configs, tmp_path, capsys):
    """Runs the command on `configs/plain.py` with `source` behind it: exit code, stdout, stderr."""
    from haikutrain import main

    def run(*flags, source="", workdir=None):
        file = tmp_path / "run.py"
        file.write_text((configs / "plain.py").read_text() + source)
        code = main.run([f"--config={file}", f"--workdir={workdir or tmp_path / 'work'}", *flags])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def check_refused():
    """Checks that a command ended with code 2 and one line on stderr that says all of these."""

    def check(result, *expected):
        code, out, err = result
        assert (code, out) == (2, "")
        assert err.startswith("haikutrain: error: ")
        assert err.count("\n") == 1
        for part in expected:
            assert part in err

    return check
