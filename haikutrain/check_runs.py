"""Checks by the command itself, in processes of its own: stopped, and resumed in another one."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from haikutrain import leaves
from haikutrain.check_table import Row, broken, held, listed, measured, unchecked
from haikutrain.checkpoint import Checkpointer
from haikutrain.errors import UsageError

RESUME = "stop, new process, go on: bit-exact"
_LIMIT = 1800.0  # Seconds that a command may take.
_SPEEDS = ("steps_per_second", "examples_per_second")
_ERROR = re.compile(r"haikutrain: |[\w.]+(Error|Exception|Exit|Interrupt|Failure)(: |$)")
_LIVE: set[subprocess.Popen[str]] = set()
_put_off: list[int] | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user's command line asks to have checked."""

    config: str
    """`FILE.py[:variant]`."""
    overrides: Sequence[str]
    """`--config.x=y` each."""
    cpu_devices: int | None
    """Devices to simulate."""

    def flags(self, fields: Mapping[str, Any], cpu_devices: int | None = None) -> list[str]:
        """The flags of a command that runs the same, but for some fields of the config."""
        count = cpu_devices or self.cpu_devices
        own = [f"--config.{name}={value}" for name, value in fields.items()]
        simulated = [] if count is None else [f"--cpu_devices={count}"]
        return [f"--config={self.config}", *self.overrides, *own, *simulated]

    @property
    def on_cpu(self) -> bool:
        """Whether it surely runs on the CPU, where several commands may run at a time."""
        return self.cpu_devices is not None or os.environ.get("JAX_PLATFORMS") == "cpu"


class Command:
    """One process of `python -m ...`, begun at once; its output goes to files in `folder`."""

    def __init__(self, folder: pathlib.Path, name: str, *arguments: str):
        self.name = name
        self._err = folder / f"{name}.err"
        with self._err.open("w") as err, (folder / f"{name}.out").open("w") as out:
            command = [sys.executable, "-m", *arguments]
            env = {**os.environ, **_shared_compilations(folder, arguments)}
            with _known():
                self._process = subprocess.Popen(
                    command, stdout=out, stderr=err, text=True, env=env
                )
                _LIVE.add(self._process)

    def wait(self) -> int:
        """Its exit code; 124 if it took too long."""
        try:
            return self._process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            end(self._process)

    @property
    def said(self) -> str:
        """What it said went wrong: the last line on stderr that names an error, or the last."""
        lines = self._err.read_text(errors="replace").splitlines()
        lines = [line for line in lines if line.strip()] or ["nothing was said"]
        errors = [line for line in lines if _ERROR.match(line)]
        return (errors or lines)[-1]


@contextlib.contextmanager
def _known() -> Iterator[None]:
    """A signal in here comes again at its end: a process that has just begun must be known."""
    global _put_off
    _put_off = []
    try:
        yield
    finally:
        numbers, _put_off = _put_off, None
        for number in numbers:
            os.kill(os.getpid(), number)


def put_off(number: int) -> bool:
    """Whether a process is just being begun; then the signal will come again."""
    if _put_off is not None:
        _put_off.append(number)
    return _put_off is not None


def end(process: subprocess.Popen[str]) -> None:
    """Ends a process that may be running."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            process.kill()
            for _ in range(200):  # Not `wait`: a signal handler may be in the middle of one.
                if process.poll() is not None:
                    break
                time.sleep(0.01)
    _LIVE.discard(process)


def end_all() -> None:
    """Ends every command that is running."""
    for process in list(_LIVE):
        end(process)


def _shared_compilations(folder: pathlib.Path, arguments: Sequence[str]) -> dict[str, str]:
    # On accelerators each process compiles for itself, as a run's would: what autotuning chooses
    # may differ, and is to be seen.
    simulated = any(argument.startswith("--cpu_devices") for argument in arguments)
    on_cpu = simulated or os.environ.get("JAX_PLATFORMS") == "cpu"
    if not on_cpu or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@dataclasses.dataclass(frozen=True)
class Plan:
    """How far the commands run."""

    half: int
    whole: int
    fields: dict[str, Any]
    """The periods that they run with."""


def plan(config: Any) -> Plan | None:
    """Six calls with a stop after three, in the middle of a log window; None if the run is one."""
    stride = config.steps_per_call
    calls = min(6, config.num_steps // stride)
    if calls < 2:
        return None
    far = max(config.num_steps, 6 * stride)
    fields: dict[str, Any] = {"log_every": 2 * stride, "eval_every": far, "checkpoint_every": far}
    if config.restore_from is not None:
        fields["restore_only"] = "weights"  # At step 0: what is there may be beyond these steps.
    return Plan(calls // 2 * stride, calls * stride, fields)


class Runs:
    """The commands of a check: a straight run, and one that is stopped and begun again.

    Raises:
      UsageError: a command was refused; in its own words.
    """

    def __init__(self, request: Request, config: Any, folder: pathlib.Path):
        self.folder = folder
        self.plan = plan(config)
        self.failure: str | None = None
        if self.plan is None:
            return
        straight, first = self._start(request, "straight", "whole"), None
        if request.on_cpu:
            first = self._start(request, "stopped", "half")
        self._finish(straight)
        self._finish(first or self._start(request, "stopped", "half"))
        if self.failure is None:
            self._finish(self._start(request, "stopped", "whole", name="resumed"))

    def _start(self, request: Request, workdir: str, until: str, name: str = "") -> Command:
        assert self.plan is not None
        fields = {**self.plan.fields, "stop_after": getattr(self.plan, until)}
        flags = [*request.flags(fields), f"--workdir={self.folder / workdir}"]
        return Command(self.folder, name or workdir, "haikutrain.main", *flags)

    def _finish(self, command: Command) -> None:
        code = command.wait()
        if code == 2:
            raise UsageError(command.said.partition("error: ")[2] or command.said)
        if code != 0 and self.failure is None:
            self.failure = f"the {command.name} run ended with code {code}: {command.said}"

    def row(self) -> Row:
        """Whether the run that was stopped is the straight one."""
        if self.plan is None:
            return unchecked(RESUME, "the run is one call of the update")
        if self.failure is not None:
            return broken(RESUME, self.failure, "run the same command without --mode=check")
        steps = [self._step(name) for name in ("straight", "stopped")]
        if steps[0] is None or steps[0] != steps[1]:
            where = f"the straight run ended at step {steps[0]}, the stopped one at {steps[1]}"
            return broken(RESUME, where, "a hook of the experiment stops it: look at hooks()")
        tables = [self._state(name) for name in ("straight", "stopped")]
        different = [path for path in tables[0] if not _equal(tables, path)]
        different += [path for path in tables[1] if path not in tables[0]]
        logs = [self.log(name) for name in ("straight", "stopped")]
        half, whole = self.plan.half, self.plan.whole
        if not different and logs[0] == logs[1]:
            return held(RESUME, f"{half} steps, then to {whole}: equal digests, equal logs")
        where = f"after {half} steps and a new start, at step {whole}: {listed(different)} differs"
        if not different:
            where = f"the logs differ: {_first_difference(*logs)}"
        return broken(
            RESUME,
            where,
            "something that the run depends on is in no checkpoint: an order of data that restarts "
            "(see the rows of the data), state kept outside of the TrainState, or randomness of "
            "the host (np.random) frozen in the update",
        )

    def _checkpoints(self, name: str) -> Checkpointer:
        return Checkpointer(self.folder / name / "checkpoints", read_only=True)

    def _step(self, name: str) -> int | None:
        return self._checkpoints(name).latest_step()

    def _state(self, name: str) -> dict[str, Any]:
        step = self._step(name)
        assert step is not None
        return leaves.leaf_table(self._checkpoints(name).read(step).state)

    def log(self, name: str) -> list[dict[str, Any]]:
        """The lines of a run's log, without speeds."""
        return [{k: v for k, v in x.items() if k not in _SPEEDS} for x in self._lines(name)]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        text = (self.folder / name / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def seconds_a_step(self) -> float | None:
        """Measured by the straight run, without its compilation; None if it failed."""
        if self.plan is None or self.failure is not None:
            return None
        speeds = [x["steps_per_second"] for x in self._lines("straight") if _SPEEDS[0] in x]
        return 1 / statistics.median(speeds) if speeds else None


def _equal(tables: Sequence[Mapping[str, Any]], path: str) -> bool:
    a, b = (table.get(path) for table in tables)
    return b is not None and a is not None and leaves.digest({path: a}) == leaves.digest({path: b})


def _first_difference(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> str:
    for old, new in zip(a, b, strict=False):
        for name, value in old.items():
            if new.get(name) != value:
                return f"{name} at step {old['step']} was {value} and is {new.get(name)}"
    return f"{len(a)} lines and {len(b)}"


# --- the whole run ---------------------------------------------------------------------------


def time_row(config: Any, seconds: float | None, save: float) -> Row:
    """How long the run will take."""
    what = "time of the whole run"
    if seconds is None:
        return unchecked(what, "no step was timed")
    saves = -(-config.num_steps // config.checkpoint_every)
    total = config.num_steps * seconds
    return measured(
        what,
        f"{config.num_steps:,} steps of {_duration(seconds)} make {_duration(total)}, without "
        f"evaluations; {saves:,} checkpoints, each written in {_duration(save)} beside training",
    )


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"
