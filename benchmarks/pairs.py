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
from haikutrain import loop

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
    total: float | None = None
    """The ratio of the sums over all pairs: what is rare, such as a save, is in it."""

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
    (result,) = rounds(first, [Side(name, second, target, pairs)], per=per)
    return result


@dataclasses.dataclass
class Side:
    """What is compared with the first side."""

    name: str
    run: Callable[[], float]
    target: float
    pairs: int
    """How many; the one with the most runs in every round, the others in some."""


def rounds(first: Callable[[], float], sides: Sequence[Side], *, per: int) -> list[Row]:
    """Runs the first side and others in turn, in rounds; each ratio is of one round.

    Who begins changes with each round, so that a drift of the machine's speed favours no side.
    """
    count = max(side.pairs for side in sides)
    times: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
    for number in range(count):
        turn = [
            side
            for side in sides
            if (number + 1) * side.pairs // count > number * side.pairs // count
        ]
        if number % 2:
            seconds = {side.name: side.run() for side in turn}
            own = first()
        else:
            own = first()
            seconds = {side.name: side.run() for side in reversed(turn)}
        for name, other in seconds.items():
            times[name].append((own, other))
    rows = []
    for side in sides:
        a, b = zip(*times[side.name], strict=True)
        result = row(
            side.name,
            statistics.median(a) / per * 1e6,
            statistics.median(b) / per * 1e6,
            "us",
            [y / x for x, y in zip(a, b, strict=True)],
            side.target,
        )
        rows.append(dataclasses.replace(result, total=sum(b) / sum(a)))
    return rows


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
        "of sums",
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
                "" if r.total is None else f"{r.total:.3f}",
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

    It is the loop that users run, with its console, `metrics.jsonl`, TensorBoard and checkpoints. A
    hook stops the clock when the devices have done the chunk's last step and the last save is
    committed, and the thread then waits in it: no work is left for it while the other side is
    timed. The hook runs before a save of the same step, so that this save is in the next chunk,
    with steps beside it.

    Args:
      experiment: what to train; without an end or an evaluation before the last step.
      chunk: steps a chunk.
    """

    def __init__(self, experiment: haikutrain.Experiment, chunk: int):
        self._go = threading.Semaphore(0)
        self._results: queue.Queue[Any] = queue.Queue()
        self._ending = False
        self._started = 0.0
        self._checkpointers: list[Any] = []
        experiment.hooks = lambda: [haikutrain.every(chunk, self._pause)]  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run, args=(experiment,))
        self._thread.start()
        self._result()  # The first chunk compiled.

    def _run(self, experiment: haikutrain.Experiment) -> None:
        try:
            with tempfile.TemporaryDirectory() as workdir, _watched_checkpointer() as made:
                self._checkpointers = made
                haikutrain.train(experiment, workdir)
        except BaseException as error:
            self._results.put(error)

    def _pause(self, info: haikutrain.StepInfo) -> None:
        info.state.step.block_until_ready()
        for checkpointer in self._checkpointers:
            checkpointer.wait()
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
def _watched_checkpointer() -> Iterator[list[Any]]:
    """The checkpointers that this thread's run makes."""
    made: list[Any] = []
    own, plain = threading.get_ident(), loop.Checkpointer

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            if threading.get_ident() == own:
                made.append(self)

    loop.Checkpointer = Watched  # type: ignore[misc]
    yield made


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
