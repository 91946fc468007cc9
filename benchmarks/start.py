"""Starting: help, the first step, and the first step of a second start, against scripts by hand.

    python benchmarks/start.py

About 3 minutes. Each measurement is the wall time of a whole process; sides in turn. By hand:
imports alone for help; for the first step `benchmarks/starts/hand.py`, which trains the same tiny
network and imports what such a script imports. Cold is without a compilation cache.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pairs

HERE = pathlib.Path(__file__).parent
IMPORTS = "import jax, haiku, optax, orbax.checkpoint"


def timed(*arguments: Any, cache: pathlib.Path | None = None) -> tuple[float, str]:
    """Seconds of `python *arguments`, and its output."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    env["XDG_CACHE_HOME"] = str(cache)
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=env,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - started, done.stdout


def first_step(cache: pathlib.Path | None) -> tuple[float, dict[str, int]]:
    """Seconds until the framework's first step is done, and what the cache had."""
    with tempfile.TemporaryDirectory() as workdir:
        command = ["-m", "haikutrain.main", f"--config={HERE / 'starts' / 'mlp.py'}"]
        command.append(f"--workdir={workdir}/run")
        command += [] if cache else ["--config.compilation_cache=off"]
        seconds, output = timed(*command, cache=cache)
    return seconds, json.loads(output.splitlines()[-1])


def compare(
    name: str, first: Callable[[], float], second: Callable[[], float], number: int, target: float
) -> pairs.Row:
    times = []
    for turn in range(number):
        if turn % 2:
            b, a = second(), first()
        else:
            a, b = first(), second()
        times.append((a, b))
    a, b = (statistics.median(side) * 1e3 for side in zip(*times, strict=True))
    return pairs.row(name, a, b, "ms", [a / b for a, b in times], target, at_most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    number = parser.parse_args().pairs

    def by_hand() -> float:
        return timed(HERE / "starts" / "hand.py")[0]

    rows = [
        compare(
            "--help, against imports",
            lambda: timed("-m", "haikutrain.main", "--help")[0],
            lambda: timed("-c", IMPORTS)[0],
            number,
            0.25,
        ),
        compare("first step, cold", lambda: first_step(None)[0], by_hand, number, 1.1),
    ]
    with tempfile.TemporaryDirectory() as folder:
        cache = pathlib.Path(folder)
        _, cold = first_step(cache)
        _, warm = first_step(cache)
        second = lambda: first_step(cache)[0]  # noqa: E731
        rows.append(compare("first step, second start", second, by_hand, number, 0.5))
    pairs.show(rows, "haikutrain", "by hand")
    print(f"cache at the first start: {cold}; at the second: {warm} (0 misses to reach)")


if __name__ == "__main__":
    main()
