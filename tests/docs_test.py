"""What the README says is run: its commands in their order, and its Python."""

import pathlib
import re
import shlex
import shutil

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, main, command):
    """A folder in which every command of the README has been run; and what each printed."""
    path = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "experiments", path / "experiments")
    (path / "my_digits.py").write_text(blocks("python")[0])
    outputs = {}
    for line in "".join(blocks("sh")).splitlines():
        if line.startswith("pip install"):
            continue  # `.ci/run` runs these two as they stand.
        words = shlex.split(line)
        assert words[:2] == ["python", "-m"]
        outputs[line] = command(*words[1:], cwd=path).stdout
    return path, outputs


def test_the_smallest_experiment_is_short_and_learns(folder):
    code = blocks("python")[0]
    assert len(code.splitlines()) < 50
    _, outputs = folder
    (evaluated,) = (text for line, text in outputs.items() if "--checkpoint=latest" in line)
    assert float(re.search(r"eval accuracy ([\d.]+)", evaluated)[1]) > 0.95


def test_a_run_resumed_twice_keeps_one_log(folder, log_lines):
    path, _ = folder
    steps = [line["step"] for line in log_lines(path / "runs/a")]
    assert steps == list(range(50, 401, 50))


def test_three_lines_of_orbax_read_what_restore_reads(folder, monkeypatch):
    path, _ = folder
    monkeypatch.chdir(path)
    plain, notebook = {}, {}
    exec(blocks("python")[1], plain)
    exec(blocks("python")[0], notebook)
    import haikutrain

    config = notebook["get_config"]()
    config.num_steps = 400
    state = haikutrain.restore(notebook["Digits"](config), "runs/a")
    jax.tree.map(np.testing.assert_array_equal, plain["params"], state.params)


def test_the_notebook_lines_run(folder, monkeypatch, capsys):
    path, _ = folder
    monkeypatch.chdir(path)
    scope = {}
    exec(blocks("python")[0], scope)
    exec(blocks("python")[2], scope)
    assert int(scope["state"].step) == 50
    assert "'accuracy'" in capsys.readouterr().out


def test_every_file_that_the_docs_name_exists():
    for document in ("README.md", "BUILD_NOTES.md"):
        text = (ROOT / document).read_text()
        for name in re.findall(r"(?:haikutrain|experiments|benchmarks|tests|docs)/\w+\.py", text):
            assert (ROOT / name).exists(), f"{document} names {name}"
