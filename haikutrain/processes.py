"""Several processes that train together. The one door to `jax.distributed`.

With one process every function here does the obvious, and costs nothing. A script that trains with
`haikutrain.train` calls `start` first and `leave` last, instead of `jax.distributed.initialize`.
"""

import contextlib
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from absl import logging

from haikutrain import cluster, errors, signals
from haikutrain.errors import PeerLost, UsageError
from haikutrain.hub import LOST
from haikutrain.job import Failure, Job
from haikutrain.wire import Address

Value = TypeVar("Value")

# Seconds that the main thread has to end by itself, before it is ended; and then for saves.
_GRACE, _COMMIT = 5.0, 40.0

_job: Job | None = None
_commits: list[Callable[[], Any]] = []
_leaving, _ending = threading.Event(), threading.Lock()


def index() -> int:
    """This process among those of the job; 0 if it is alone."""
    return 0 if _job is None else _job.index


def count() -> int:
    """The processes of the job."""
    return 1 if _job is None else _job.count


# --- beginning -------------------------------------------------------------------------------


def start(
    mode: str = "auto",
    *,
    address: Address | str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    init_timeout: float = 60,
) -> None:
    """Joins the processes of a job. To be called before any JAX backend starts.

    Args:
      mode: "on", "off", or "auto": on where arguments or the environment (Open MPI, SLURM, TPU
        pods, Kubernetes) say that there are several.
      address: where process 0 listens, HOST:PORT; None if the environment says so, as the next two.
      num_processes: all of them.
      process_id: this one.
      init_timeout: seconds to wait for the others.

    Raises:
      UsageError: not all processes came in time, they contradict each other, or the port is taken.
      PeerLost: one of them came and died.
      Stopped: a signal came while it waited.
    """
    if isinstance(address, str):
        address = Address.parse(address)
    given = (address, num_processes, process_id)
    if mode == "off" or (mode == "auto" and given == (None, None, None) and not cluster.present()):
        return
    if num_processes == 1:
        return
    local_ids = None
    if None in given and (kind := cluster.present()):
        address, num_processes, process_id, local_ids = cluster.ask(
            kind, address, num_processes, process_id, init_timeout
        )
        if num_processes == 1:
            return
    if address is None or num_processes is None or process_id is None:
        raise UsageError(
            "--jax_distributed=on needs --coordinator_address=HOST:PORT, --num_processes and "
            "--process_id; only under Open MPI, SLURM, Kubernetes and on TPU pods can they be left "
            "out"
        )
    if not 0 <= process_id < num_processes:
        raise UsageError(
            f"--process_id={process_id}: it must be from 0 to --num_processes={num_processes} - 1"
        )
    _join(address, num_processes, process_id, local_ids, init_timeout)


def _join(
    address: Address, number: int, own: int, local_ids: list[int] | None, seconds: float
) -> None:
    global _job
    _job = Job(own, number, address, _end_soon)
    if own:
        logging.set_verbosity(logging.ERROR)  # Process 0 speaks for all.
    native = _job.meet(seconds)
    import jax

    def give_up() -> None:
        _say(f"error: JAX did not join the processes within --init_timeout={seconds:g} seconds")
        os._exit(2)

    # Where JAX does not succeed it aborts, later than this.
    with _limit(seconds, give_up):
        # Its handler of SIGTERM would take the place of ours.
        jax.config.update("jax_enable_preemption_service", False)
        jax.config.update("jax_check_proxy_envs", False)  # Its connections stay on loopback.
        no_proxy = os.environ.get("no_proxy", "")
        os.environ.setdefault("no_grpc_proxy", f"{no_proxy},127.0.0.1".lstrip(","))
        try:
            jax.distributed.initialize(
                native,
                number,
                own,
                # JAX looks there by itself.
                None if "JAX_LOCAL_DEVICE_IDS" in os.environ else local_ids,
                cluster_detection_method="deactivate",
                coordinator_bind_address=native,
                initialization_timeout=int(seconds) + 60,
                # Who dies is noticed by `Job`; JAX would end all with an abort.
                heartbeat_timeout_seconds=3600,
                shutdown_timeout_seconds=60,
            )
        except RuntimeError as error:
            raise UsageError(f"the processes cannot be joined: {error}") from error
    _job.joined = True


@contextlib.contextmanager
def _limit(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# --- together --------------------------------------------------------------------------------


def gather(what: str, value: Value) -> list[Value]:
    """The values (JSON's own types) of all processes, in their order, in all of them.

    All processes call this and the other functions of this section in the same order.

    Args:
      what: what for; the same in all.
      value: this process's.

    Raises:
      PeerLost: a process of the job has failed.
    """
    if _job is None:
        return [value]
    return [json.loads(text) for text in _job.gather(what, json.dumps(value))]


def agree(same: Mapping[str, Any], own: Value) -> list[Value]:
    """The `own` values of all processes, where what must be the same is the same.

    Raises:
      UsageError: the processes were started to do different things; names the first of `same`.
    """
    if _job is None:
        return [own]
    found: list[Any] = gather("what all do", [same, own])
    first = found[0][0]
    for other, (theirs, _) in enumerate(found):
        for name in first:
            if theirs.get(name) != first[name]:
                raise UsageError(
                    f"{name} must be the same in all processes, and is {first[name]} in process 0 "
                    f"and {theirs.get(name)} in process {other}; start all with the same command "
                    "and files"
                )
    return [value for _, value in found]


def from_main(what: str, function: Callable[[], Value]) -> Value:
    """What `function` returns in process 0, which alone calls it, in all processes.

    What it returns must be of JSON's own types. An error of `haikutrain.errors` is raised in all of
    them.
    """
    if _job is None:
        return function()
    outcome: dict[str, Any] = {}
    if _job.index == 0:
        try:
            outcome = {"value": function()}
        except Exception as error:
            if not hasattr(errors, type(error).__name__):
                raise
            outcome = {"error": type(error).__name__, "text": str(error)}
    outcome = gather(what, outcome)[0]
    if "error" in outcome:
        raise getattr(errors, outcome["error"])(outcome["text"])
    return outcome["value"]


def stop_requested() -> str | None:
    """The name of a signal that asks the run to stop, or None; the same in all processes.

    To be asked once before each call of the update.
    """
    return signals.received() if _job is None else _job.stop_requested()


@contextlib.contextmanager
def committing(wait: Callable[[], Any]) -> Iterator[None]:
    """In here, a process that must end because another one died first calls `wait`."""
    _commits.append(wait)
    try:
        yield
    finally:
        _commits.remove(wait)


# --- ending ----------------------------------------------------------------------------------


def leave(code: int, text: str | None = None, error: BaseException | None = None) -> int:
    """Ends this process's part in the job; prints what there is to say, once in the job.

    Several processes: with code 0 or 42 it returns when all have come here, process 0 with its
    last save committed. With another code, or where another process has failed, it tells the others
    and ends this process at once: no cleaning up that waits for processes that are gone.

    Args:
      code: the exit code that this process is to end with.
      text: a line to print.
      error: why it ends.

    Returns:
      `code`.
    """
    if _job is None:
        _say(text)
        return code
    _leaving.set()
    _ending.acquire()  # And never released: from now on nobody else ends this process.
    if code == 42 and not _job.joined:
        _say(text)
        _job.close()
        return code
    if code in (0, 42):
        try:
            _end_together(_job, code)
        except PeerLost as lost:
            error = lost
        else:
            if _job.index == 0:
                _say(text)
            return code
    return _end(_fail(_job, code, text, error))


def _fail(job: Job, code: int, text: str | None, error: BaseException | None) -> int:
    """Tells the others, and whoever reads along; returns the exit code."""
    if _is_consequence(job, error):
        code = _consequence(job)
    else:
        if text is None and isinstance(error, Exception):
            traceback.print_exception(error)
        summary = text.removeprefix("error: ") if text else f"{type(error).__name__}: {error}"
        heard = job.fail(code, summary if code == 2 else f"process {job.index} ended: {summary}")
        if job.index == 0 or not heard:
            _say(text)
    job.wait_heard(5)
    return code


def _end_together(job: Job, code: int) -> None:
    import jax

    job.end()
    with _limit(20, lambda: os._exit(code)):
        jax.distributed.shutdown()
        job.close()


def _is_consequence(job: Job, error: BaseException | None) -> bool:
    """Whether this process ends because another one did."""
    if isinstance(error, PeerLost):
        return True
    if isinstance(error, UsageError):
        return job.failure is not None and job.failure.code == 2
    # A collective can fail before the news is here.
    return _is_native(error) and job.wait_failure(3)


def _is_native(error: BaseException | None) -> bool:
    """Whether it comes from XLA, which also raises ValueErrors that begin with a status."""
    if isinstance(error, ValueError):
        return bool(re.match(r"[A-Z]+(_[A-Z]+)*: ", str(error)))
    return type(error).__name__ == "JaxRuntimeError"


def _consequence(job: Job) -> int:
    """Says what ended the job, if that is for this process to say; returns the exit code."""
    failure = job.failure
    assert failure is not None
    if failure.code == 2:
        if job.index in (0, failure.process):
            _say(f"error: {failure.text}" + job.joined * f" (process {failure.process})")
        return 2
    if job.index == 0 or (failure.process, failure.code) == (0, LOST):
        _say(str(job.lost()))
    return LOST


def _end_soon(failure: Failure) -> None:
    """Ends this process if its main thread does not: it may wait for one that is gone."""
    del failure
    if _leaving.wait(_GRACE):
        return
    saver = threading.Thread(target=_commit, daemon=True)
    saver.start()
    saver.join(_COMMIT)
    if _ending.acquire(blocking=False) and _job is not None:
        _end(_consequence(_job))


def _commit() -> None:
    with contextlib.suppress(Exception):
        for wait in list(_commits):
            wait()


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _say(text: str | None) -> None:
    if text is not None:
        print(f"haikutrain: {' '.join(text.split())}", file=sys.stderr, flush=True)
