"""`--mode=check`: proves or refutes each promise on the user's own experiment.

A few steps are run in a temporary folder, by the command itself in processes of its own and by the
framework's programs in this one. Nothing is written elsewhere.
"""

import contextlib
import copy
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import jax

from haikutrain import (
    check_cost,
    check_data,
    check_evaluation,
    check_replicas,
    check_runs,
    check_update,
    config_file,
    devices,
)
from haikutrain import config as configs
from haikutrain.check_devices import DEVICES, Elsewhere, devices_row
from haikutrain.check_runs import Request, Runs
from haikutrain.check_table import BROKEN, HELD, Row, listed, table, unchecked
from haikutrain.check_trace import UpdateTrace
from haikutrain.check_watch import Seen, Steps
from haikutrain.start import Task

_STEPS = 4  # That are compared on other devices.


def check(request: Request) -> int:
    """Checks the experiment of a command line, and prints what was found.

    Returns:
      The exit code: 0, or 2 if a promise is broken.

    Raises:
      UsageError: a mistake in the config, the data or the experiment.
    """
    if request.cpu_devices is not None and request.cpu_devices > 1:
        devices.simulate(request.cpu_devices)
    loaded = config_file.load(request.config, request.overrides)
    configs.validate(loaded.config)
    _simulate_two(request, loaded.config)
    rows: list[Row] = []
    with _folder() as folder:
        try:
            _say("running the command: once straight on, once stopped and begun again")
            # First of all: an accelerator has no room for them once this process uses it.
            runs = Runs(request, loaded.config, folder)
            _say("looking at single steps")
            for row in check_experiment(loaded.experiment_class(loaded.config), request, runs):
                rows.append(row)
        finally:
            if rows:
                print(table(rows))
    return 2 if any(row.result == BROKEN for row in rows) else 0


def _say(text: str) -> None:
    print(f"check: {text} ...", file=sys.stderr, flush=True)


def check_experiment(experiment: Any, request: Request, runs: Runs) -> Iterator[Row]:
    """The rows of an experiment whose commands have been run."""
    configs.validate(experiment.config, device_count=devices.device_count())
    others = _begin_elsewhere(request, runs.folder, experiment.config)
    looked = Looked(experiment)
    yield from looked.rows()
    yield from check_data.data_rows(experiment)
    yield runs.row()
    if looked.trace is None:
        return
    yield _devices_row(looked, others)
    tolerance = _tolerance(looked.trace)
    yield check_cost.calls_row(looked.steps, tolerance)
    yield check_cost.cost_row(looked.task, looked.steps)
    saved, seconds = check_cost.checkpoint_row(looked.task, looked.steps.first, runs.folder)
    yield saved
    yield check_runs.time_row(experiment.config, runs.seconds_a_step(), seconds)


class Looked:
    """An experiment's first steps, looked at in this process.

    Attributes:
      task: the experiment, not watched.
      steps: what it did, watched.
      seen: what was noticed meanwhile.
      trace: of its update; None if that cannot be traced.
      pure: whether the update is a pure function.
    """

    steps: Steps
    seen: Seen

    def __init__(self, experiment: Any):
        self._experiment = experiment
        self.task = Task(type(experiment)(copy.deepcopy(experiment.config)))
        self.trace: UpdateTrace | None = None
        self.pure = False

    def rows(self) -> Iterator[Row]:
        """What was found. To be read to its end before the attributes are."""
        params = check_update.params_row(self.task)
        yield params
        if params.result == BROKEN:
            yield unchecked(check_update.GRADIENTS, "the update cannot be traced")
            return
        yield check_update.shapes_row(self.task)
        self.task.check_update()
        pure, trace = check_update.pure_row(self._experiment, self.task)
        yield pure
        self.pure = pure.result == HELD
        if trace is None:
            yield unchecked(check_update.GRADIENTS, "the update cannot be run")
            return
        self.steps, self.seen = check_update.take_steps(self._experiment)
        yield from check_update.update_rows(self.steps, self.seen, trace)
        yield check_replicas.replicas_row(self.steps)
        yield check_replicas.random_row(self.steps, trace)
        yield check_update.traces_row(self.steps, self.seen)
        yield check_evaluation.evaluation_row(self.steps, self.seen)
        self.trace = trace


# --- other devices ---------------------------------------------------------------------------


def _simulate_two(request: Request, config: Any) -> None:
    """Where there is one CPU, makes two devices or a few more of it, if a batch can be split."""
    parts = config.accumulate_steps
    count = next((n for n in (2, 3, 5, 7) if config.batch_size % (n * parts) == 0), 1)
    if request.cpu_devices == 1:
        devices.simulate(count)
    elif request.cpu_devices is None and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        os.environ.setdefault("PJRT_NPROC", "16")
        with contextlib.suppress(RuntimeError):  # The config file has started JAX.
            jax.config.update("jax_num_cpu_devices", count)  # Changes nothing on accelerators.


def _begin_elsewhere(request: Request, folder: pathlib.Path, config: Any) -> list[Elsewhere]:
    """Runs on simulated devices to compare with: one on the CPU, elsewhere two with each other."""
    steps = min(_STEPS, config.num_steps)
    here = devices.device_count()
    if jax.default_backend() == "cpu":
        return [] if here == 1 else [Elsewhere(request, folder, 1, steps)]
    if config.batch_size % (2 * config.accumulate_steps):
        return []
    return [Elsewhere(request, folder, count, steps) for count in (1, 2)]


def _devices_row(looked: Looked, others: list[Elsewhere]) -> Row:
    steps, trace = looked.steps, looked.trace
    assert trace is not None
    if not looked.pure:
        return unchecked(DEVICES, "the update is another program in each process")
    if not others:
        return unchecked(DEVICES, "a batch cannot be split over two devices")
    results = [other.result() for other in others]
    for result in results:
        if isinstance(result, str):
            return unchecked(DEVICES, result)
    runs: list[Any] = list(results)
    counts = [other.cpu_devices for other in others]
    if len(runs) == 1:
        runs.append({"metrics": steps.metrics, "data": steps.data})
        counts.append(devices.device_count())
    sources = sorted({draw.source for draw in trace.draws})
    reasons = []
    if looked.seen.local_norms:
        norms = listed(sorted(looked.seen.local_norms))
        reasons.append(f"BatchNorm by the rows of each device in {norms}")
    if sources:
        reasons.append(f"each device draws its own random numbers in {listed(sources)}")
    pair = counts[0], counts[1]
    return devices_row(runs[0], runs[1], pair, reasons, _tolerance(trace))


def _tolerance(trace: UpdateTrace) -> float:
    return 2e-2 if trace.low_precision else 1e-5


# --- the temporary folder --------------------------------------------------------------------


@contextlib.contextmanager
def _folder() -> Iterator[pathlib.Path]:
    """A temporary folder, gone at the end; a signal ends the process, and the commands it runs."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="haikutrain-check-"))

    def clean() -> None:
        check_runs.end_all()
        shutil.rmtree(path, ignore_errors=True)

    def interrupted(number: int, frame: Any) -> None:
        del frame
        if check_runs.put_off(number):
            return
        clean()
        os.write(2, b"haikutrain: interrupted\n")
        os._exit(130 if number == signal.SIGINT else 42)

    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if main else ()
    before = {number: signal.signal(number, interrupted) for number in numbers}
    try:
        yield path
    finally:
        clean()
        for number, handler in before.items():
            signal.signal(number, handler)
