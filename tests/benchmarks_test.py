"""The commands behind the README's figures run: here with few pairs and small states."""

import pathlib
import re
import shlex

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SMALL = {
    "loop": "--case mlp --devices 1 --steps_per_call 1 --against hand stacked --pairs 1",
    "saving": "--params=1e5 --saves=2",
    "restore": "--pairs=2 --millions=1",
    "start": "--pairs=1",
    "memory": "--pairs=1",
    "gloo": "--pairs=1 --case '2 hidden layers'",
    "feed": "--pairs=2",
}


@pytest.mark.parametrize("name", SMALL)
def test_it_runs(command, name):
    done = command(ROOT / "benchmarks" / f"{name}.py", *shlex.split(SMALL[name]))
    assert re.search(r"\d\.\d", done.stdout)


def test_the_readme_names_no_other():
    named = re.findall(r"benchmarks/(\w+)\.py", (ROOT / "README.md").read_text())
    assert named
    assert set(named) <= set(SMALL)
