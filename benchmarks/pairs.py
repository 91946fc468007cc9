"""How two sides are compared: short chunks in turn in one process, the median of their ratios."""

import contextlib
import dataclasses
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import haikutrain

FAR = 1 << 30
"""A number of steps, or a period, that no benchmark reaches; a multiple of any K used here."""


@dataclasses.dataclass
class Row:
    """One comparison: how many times faster, or smaller, the first side is than the second."""

    name: str
    first: float
    """Median of the first side, in `unit`."""
    second: float
    unit: str
    ratio: float
    """The median of the pairs' ratios."""
    interval: tuple[float, float]
    """Of that median, 95 %: by order statistics, whatever the distribution."""
    quartiles: tuple[float, float]
    """Between them lie half of the pairs."""
    pairs: int
    target: float
    at_most: bool = False
    """Whether the target is a bound from above."""

    @property
    def good(self) -> bool:
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target


def compare(
    name: str,
    first: Callable[[], float],
    second: Callable[[], float],
    pairs: int,
    *,
    per: int,
    target: float,
) -> Row:
    """Runs both sides in turn; each call returns the seconds of a chunk of `per` steps.

    The ratio is that of speeds: above 1 the first side is faster. Who begins changes with each
    pair, so that a drift of the machine's speed favours neither.
    """
    times = []
    for number in range(pairs):
        if number % 2:
            b, a = second(), first()
        else:
            a, b = first(), second()
        times.append((a, b))
    a, b = (statistics.median(side) / per * 1e6 for side in zip(*times, strict=True))
    return row(name, a, b, "us", [b / a for a, b in times], target)


def row(
    name: str,
    first: float,
    second: float,
    unit: str,
    ratios: Sequence[float],
    target: float,
    *,
    at_most: bool = False,
) -> Row:
    """Sums up a list of ratios."""
    ordered, n = sorted(ratios), len(ratios)
    half = math.ceil(0.98 * math.sqrt(n))
    low, high = max(0, n // 2 - half), min(n - 1, n // 2 + half)
    return Row(
        name,
        first,
        second,
        unit,
        statistics.median(ordered),
        (ordered[low], ordered[high]),
        (ordered[n // 4], ordered[(3 * n) // 4]),
        n,
        target,
        at_most,
    )


def show(rows: Sequence[Row], first: str, second: str) -> None:
    """Prints a table."""
    head = [
        "",
        first,
        second,
        "ratio",
        "95 % of the median",
        "half of the pairs",
        "pairs",
        "target",
    ]
    lines = [head]
    for r in rows:
        lines.append(
            [
                r.name,
                f"{r.first:.1f} {r.unit}",
                f"{r.second:.1f} {r.unit}",
                f"{r.ratio:.3f}",
                "{:.3f} to {:.3f}".format(*r.interval),
                "{:.3f} to {:.3f}".format(*r.quartiles),
                str(r.pairs),
                f"{'<=' if r.at_most else '>='} {r.target:g}{'' if r.good else '  MISSED'}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        )


# --- the framework's own loop, a chunk at a time --------------------------------------------------


class Paced:
    """`haikutrain.train` in a thread that goes on for one chunk of steps when it is asked to.

    It is the loop that users run, with its console, `metrics.jsonl` and TensorBoard. A hook stops
    the clock when the devices have done the chunk's last step, and the thread then waits in it: no
    work is left for it while the other side is timed.

    Args:
      experiment: what to train; without an end, a checkpoint or an evaluation before the last step.
      chunk: steps a chunk.
    """

    def __init__(self, experiment: haikutrain.Experiment, chunk: int):
        self._go = threading.Semaphore(0)
        self._results: queue.Queue[Any] = queue.Queue()
        self._ending = False
        self._started = 0.0
        experiment.hooks = lambda: [haikutrain.every(chunk, self._pause)]  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run, args=(experiment,))
        self._thread.start()
        self._result()  # The first chunk compiled.

    def _run(self, experiment: haikutrain.Experiment) -> None:
        try:
            with tempfile.TemporaryDirectory() as workdir:
                haikutrain.train(experiment, workdir)
        except BaseException as error:
            self._results.put(error)

    def _pause(self, info: haikutrain.StepInfo) -> None:
        info.state.step.block_until_ready()
        self._results.put(time.perf_counter() - self._started)
        self._go.acquire()
        if self._ending:
            info.stop("it is measured")
        self._started = time.perf_counter()

    def _result(self) -> float:
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def __call__(self) -> float:
        """Seconds of the next chunk."""
        self._go.release()
        return self._result()

    def close(self) -> None:
        self._ending = True
        self._go.release()
        self._thread.join()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Sends what the loop shows on its console nowhere; it is still written."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def in_fresh_process(script: str, *arguments: Any) -> dict[str, Any]:
    """Runs a script and returns the JSON object that it prints last."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def row_of(script: str, *arguments: Any) -> Row:
    """The row that a script prints as JSON."""
    return Row(**in_fresh_process(script, *arguments))
