"""Signals: a run that is asked to stop ends after its step; a second Ctrl-C ends it at once.

A handler only takes note. An exception raised by one could come up anywhere, in a callback of the
garbage collector as well, which swallows it.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

_CAUGHT = (signal.SIGTERM, signal.SIGINT)

_received: list[signal.Signals] = []
_at_once = False


@contextlib.contextmanager
def caught() -> Iterator[None]:
    """Takes note of SIGTERM and SIGINT in here, in the main thread; elsewhere does nothing."""
    global _at_once
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _take_note) for number in _CAUGHT}
    if _take_note not in before.values():
        _received.clear()
    _at_once = False
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def catch() -> None:
    """Takes note of both from now on: for a process that only runs the command."""
    for number in _CAUGHT:
        signal.signal(number, _take_note)


def ignore() -> None:
    """Takes no note any more: the exit code stands, and Python itself has yet to end."""
    for number in _CAUGHT:
        signal.signal(number, signal.SIG_IGN)


def end_with(parent: int) -> None:
    """Lets the kernel end this process when its parent dies, or the thread there that started it.

    Elsewhere than on Linux only looks whether the parent is alive.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG.
    if os.getppid() != parent:
        sys.exit()


def end_at_once() -> None:
    """From now on a first signal ends the process: there is nothing to save."""
    global _at_once
    _at_once = True
    if _received:
        _end(_received[0])


def received() -> str | None:
    """The name of the first signal since `caught` was entered, None if there was none."""
    return _received[0].name if _received else None


def _take_note(number: int, frame: Any) -> None:
    del frame
    again = number == signal.SIGINT and signal.SIGINT in _received
    _received.append(signal.Signals(number))
    if again or _at_once:
        _end(_received[-1])
    elif len(_received) == 1:
        _say(f"{_received[0].name}: stopping after this step; Ctrl-C twice to end at once")


def _end(number: signal.Signals) -> None:
    _say("interrupted")
    os._exit(130 if number == signal.SIGINT else 42)


def _say(text: str) -> None:
    # Not `print`: a signal may come in the middle of one.
    with contextlib.suppress(OSError):
        os.write(2, f"haikutrain: {text}\n".encode())
