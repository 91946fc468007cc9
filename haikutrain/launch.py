"""Several processes of one job on this machine.

    python -m haikutrain.launch --nproc=2 [--cpu_devices=2] -- --config=FILE.py [--workdir=DIR ...]

starts `python -m haikutrain.main` so many times, on a free port of loopback, with what stands
behind `--`. Each line that a process prints comes out behind its number, `[0] `. SIGTERM and Ctrl-C
are passed on. If one process ends with an error, so do the others. They end with this one, however
it ends. It starts nothing again: that is the scheduler's work, which the exit code tells.

Exit code: 0 if all processes ended with 0; else the first other code than 75 (a process died by
itself, and the others lost it); else 75. A process that was killed counts as 75, one that crashed
(SIGSEGV, SIGABRT and their like) as 1, one that a forwarded SIGTERM ended before it could save
anything as 42. Without --cpu_devices process i sees the machine's accelerator number i.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NoReturn

from haikutrain.command_line import COMMAND
from haikutrain.errors import UsageError

# Seconds that the others have after one has failed: to end by themselves, and once asked to.
_PATIENCE, _GRACE = 5.0, 50.0

_LOST, _STOPPED, _INTERRUPTED = 75, 42, 130
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_PR_SET_PDEATHSIG = 1
_OWN = ("num_processes", "process_id", "coordinator_address", "jax_distributed", "cpu_devices")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; write --nproc=N [--cpu_devices=M] -- --config=FILE.py")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    try:
        args = _parse(sys.argv[1:] if argv is None else list(argv))
    except UsageError as error:
        print(f"haikutrain: error: {error}", file=sys.stderr)
        return 2
    job = _Job()
    handlers = {
        number: signal.signal(number, lambda number, frame: job.forward(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        job.start(_commands(args), {COMMAND: json.dumps(_own_command(args))})
        return job.wait()
    finally:
        job.kill()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _parse(argv: list[str]) -> argparse.Namespace:
    end = argv.index("--") if "--" in argv else len(argv)
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = _Parser(
        prog="python -m haikutrain.launch",
        description=f"{summary}\n\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--nproc", type=int, required=True, help="how many processes")
    parser.add_argument("--cpu_devices", type=int, help="simulated devices of each process")
    args = parser.parse_args(argv[:end])
    args.flags = argv[end + 1 :]
    if args.nproc < 1:
        raise UsageError(f"--nproc={args.nproc}: it must be 1 or more")
    if not args.flags:
        parser.error("there are no flags for the processes behind --")
    for flag in args.flags:
        if flag.lstrip("-").partition("=")[0] in _OWN:
            parser.error(f"{flag} behind -- is for this command to set")
    return args


def _own_command(args: argparse.Namespace) -> list[str]:
    simulated = [] if args.cpu_devices is None else [f"--cpu_devices={args.cpu_devices}"]
    own = ["python", "-m", "haikutrain.launch", f"--nproc={args.nproc}", *simulated]
    return [*own, "--", *args.flags]


def _commands(args: argparse.Namespace) -> list[list[str]]:
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-u", "-m", "haikutrain.main", *args.flags]
    command += [f"--num_processes={args.nproc}", f"--coordinator_address=127.0.0.1:{port}"]
    if args.cpu_devices is not None:
        command.append(f"--cpu_devices={args.cpu_devices}")
    return [[*command, "--jax_distributed=on", f"--process_id={i}"] for i in range(args.nproc)]


class _Job:
    """The processes, and what has become of them."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._codes: dict[int, int] = {}
        """Of those that have ended, in the order in which they did."""
        self._forwarded: list[int] = []
        self._killed = False
        self._printing = threading.Lock()
        self._readers: list[threading.Thread] = []

    def start(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
        """Starts all, with so much added to the environment; passes on what they print."""
        last_will = _end_with_this_process()
        for index, command in enumerate(commands):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Of a session of its own: Ctrl-C in a terminal comes from here alone.
                start_new_session=True,
                preexec_fn=last_will,
                env={"JAX_LOCAL_DEVICE_IDS": str(index), **os.environ, **environment},
            )
            self._processes.append(process)
            for number in self._forwarded:  # Came meanwhile.
                process.send_signal(number)
        # Not earlier: a process with threads should not fork.
        for index, process in enumerate(self._processes):
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                reader = threading.Thread(
                    target=self._copy, args=(f"[{index}] ", source, target), daemon=True
                )
                reader.start()
                self._readers.append(reader)

    def _copy(self, prefix: str, source: IO[bytes], target: IO[str]) -> None:
        for line in source:
            text = line.decode(errors="replace").rstrip("\n")
            # Whoever reads may be gone; the processes must not wait for it.
            with self._printing, contextlib.suppress(OSError, ValueError):
                target.write(f"{prefix}{text}\n")
                target.flush()

    def forward(self, number: int) -> None:
        """Passes a signal on to all processes."""
        self._forwarded.append(number)
        for process in self._processes:
            process.send_signal(number)

    def wait(self) -> int:
        """Waits for all; if one fails, ends the others. Returns the job's exit code."""
        failed: float | None = None
        asked = False
        while len(self._codes) < len(self._processes):
            time.sleep(0.05)
            for index, process in enumerate(self._processes):
                if index not in self._codes and (code := process.poll()) is not None:
                    self._codes[index] = self._meaning(code)
                    if code < 0 and not self._killed:
                        name = signal.Signals(-code).name
                        print(f"haikutrain: process {index} was ended by {name}", file=sys.stderr)
            if failed is None and set(self._codes.values()) - {0, _STOPPED}:
                failed = time.monotonic()
            elapsed = 0.0 if failed is None else time.monotonic() - failed
            if elapsed > _PATIENCE and not asked:
                asked = self._killed = True
                for process in self._processes:
                    process.terminate()
            if elapsed > _PATIENCE + _GRACE:
                self.kill()
        end = time.monotonic() + 2  # What they have started may hold their output longer.
        for reader in self._readers:
            reader.join(max(0.0, end - time.monotonic()))
        codes = list(self._codes.values())
        return next((code for code in codes if code not in (0, _LOST)), max(codes))

    def _meaning(self, code: int) -> int:
        """The exit code that a process's end counts as."""
        if code == _STOPPED and self._killed and not self._forwarded:
            return _LOST  # It was asked to stop because another one had died.
        if code >= 0:
            return code
        if -code in _CRASHES:
            return 1
        if self._killed or -code not in self._forwarded:
            return _LOST
        return _INTERRUPTED if -code == signal.SIGINT else _STOPPED

    def kill(self) -> None:
        """Ends what still runs, at once."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()


def _end_with_this_process() -> Callable[[], None]:
    """What a child does first: the kernel is to kill it when this process has died."""
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def set_last_will() -> None:
        if hasattr(libc, "prctl"):  # Linux.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(_LOST)

    return set_last_will


if __name__ == "__main__":
    sys.exit(main())
