"""A job of several processes as one of them sees it: they begin, speak, stop and end together.

Each process keeps one connection to process 0 (its hub) for as long as it lives, in a thread of its
own. So a death is noticed at once, whatever the main thread waits for, and small texts travel
without the devices.
"""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from haikutrain import signals
from haikutrain.errors import PeerLost, Stopped, UsageError
from haikutrain.hub import END, HEARTBEAT, HELLO, LOST, SILENCE, Hub
from haikutrain.wire import Address, Garbled, Message, frame, pipe, read_frame, reason, watch


@dataclasses.dataclass(frozen=True)
class Failure:
    """What ended the job first."""

    process: int
    code: int
    """The exit code that it ends or ended with; 75 if it died without a word."""
    text: str


class Job:
    """This process among those of its job.

    Args:
      index: this process, from 0.
      count: all of them.
      address: where process 0 listens.
      on_failure: called once, in a thread of its own, when a process of the job has failed.
    """

    def __init__(
        self, index: int, count: int, address: Address, on_failure: Callable[[Failure], None]
    ):
        self.index = index
        self.count = count
        self.failure: Failure | None = None
        self.joined = False
        """To be set once JAX knows of the others, too."""
        self._address = address
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._begun = self._noted = self._ended = False
        self._waiting_for: list[int] | None = None
        self._trouble, self._refusal = "nobody answers", ""
        self._number = 0
        self._end = -1
        self._texts: dict[int, list[str]] = {}
        self._calls = 0
        self._asked = self._hold = False
        self._stop: tuple[int, str] | None = None
        self._relay: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._hub = Hub(count, self._take) if index == 0 else None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    # --- beginning ---

    def meet(self, seconds: float) -> str:
        """Waits until all processes are there.

        Returns:
          Where JAX is to find its coordinator: in process 0 an address to listen on, elsewhere one
          that leads there.

        Raises:
          UsageError: not all came in time, or they contradict each other.
          PeerLost: one came and died.
          Stopped: a signal came first.
        """
        deadline = time.monotonic() + seconds
        if self._hub is not None:
            self._listen(self._hub, deadline)
            port = self._hub.native_port
        else:
            port = self._run(self._open_relay()).result()
            self._run(self._connect(deadline))
        while not self._begun:
            with self._changed:
                self._changed.wait_for(lambda: self._begun or self.failure, 0.2)
            if self.failure is not None:
                raise self.lost() if self.failure.code == LOST else UsageError(self.failure.text)
            if name := signals.received():
                raise Stopped(f"{name} came before all processes of the job were there")
            if not self._begun and time.monotonic() > deadline:
                raise UsageError(self._nobody_came(seconds))
        return f"127.0.0.1:{port}"

    def _listen(self, hub: Hub, deadline: float) -> None:
        patience = min(deadline, time.monotonic() + 3)  # A job that has just ended may hold it.
        while True:
            try:
                self._run(hub.serve(self._address.bind, self._address.port)).result()
                return
            except OSError as error:
                if time.monotonic() > patience:
                    raise UsageError(
                        f"process 0 cannot listen at --coordinator_address={self._address} "
                        f"({reason(error)}); give a free port of its machine"
                    ) from error
            time.sleep(0.2)

    def _nobody_came(self, seconds: float) -> str:
        within = f"within --init_timeout={seconds:g} seconds"
        missing = self._waiting_for if self._hub is None else self._hub.missing()
        if missing is None:
            return (
                f"process {self.index} did not reach process 0 at --coordinator_address="
                f"{self._address} {within} ({self._refusal or self._trouble}); "
                "start all processes, with one address"
            )
        who = f"process{'es' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return (
            f"{who} of {self.count} did not come to --coordinator_address={self._address} {within};"
            " start all of them, each with its own --process_id"
        )

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _open_relay(self) -> int:
        """JAX ends its process at once when its connection to the coordinator is closed.

        So it is given one that nobody closes: a port of this process, passed on to process 0.
        """

        async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                there = await asyncio.open_connection(self._address.host, self._address.port)
                there[1].write(frame({HELLO: "relay"}))
                await pipe((reader, writer), there)

        self._relay = await asyncio.start_server(passed_on, "127.0.0.1", 0)
        return self._relay.sockets[0].getsockname()[1]

    async def _connect(self, deadline: float) -> None:
        while not self._begun and self.failure is None and time.monotonic() < deadline:
            try:
                opening = asyncio.open_connection(self._address.host, self._address.port)
                await self._stay(*await asyncio.wait_for(opening, 5))
            except TimeoutError:
                self._trouble = "no answer"
            except EOFError:
                self._trouble = "something there closes the connection"
            except OSError as error:
                self._trouble = reason(error)
            except Garbled:
                self._trouble = "something else listens there"
            self._waiting_for = None
            await asyncio.sleep(0.2)

    async def _stay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listens to process 0 until the connection ends."""
        watch(writer)
        self._trouble = "what listens there does not answer"
        writer.write(frame({HELLO: "member", "index": self.index, "count": self.count}))
        self._writer = writer
        beat = asyncio.ensure_future(self._beat(writer))
        try:
            while True:
                self._take(await asyncio.wait_for(read_frame(reader), SILENCE))
        except TimeoutError:
            self._lost(f"process 0 gave no sign of life for {SILENCE:.0f} seconds")
        except (OSError, EOFError, Garbled):
            if not self._begun and self._waiting_for is None:
                raise
            self._lost("process 0 died")
        finally:
            beat.cancel()
            self._writer = None
            writer.close()

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT)
            writer.write(frame({"kind": "alive"}))

    def _lost(self, text: str) -> None:
        if not self._ended:
            self._take({"kind": "failed", "process": 0, "code": LOST, "text": text})

    # --- messages ---

    def _tell(self, message: Message) -> None:
        """Tells process 0; returns at once."""
        self._loop.call_soon_threadsafe(self._send, message)

    def _send(self, message: Message) -> None:
        if self._hub is not None:
            self._hub.handle(0, message)
        elif self._writer is not None:
            self._writer.write(frame(message))

    def _take(self, message: Message) -> None:
        """Takes what process 0 says; runs in the loop's thread."""
        kind = message["kind"]
        with self._changed:
            if kind == "begin":
                self._begun = True
            elif kind == "waiting":
                self._waiting_for = message["for"]
            elif kind == "refused":
                self._refusal = message["text"]
                if message["final"]:
                    self.failure = Failure(self.index, 2, message["text"])
            elif kind == "noted":
                self._noted = True
            elif kind == "texts":
                self._texts[message["number"]] = message["texts"]
                self._ended = message["number"] == self._end
            elif kind == "hold":
                self._hold = True
                self._send({"kind": "calls", "calls": self._calls})
            elif kind == "stop_at":
                self._stop, self._hold = (message["call"], message["name"]), False
            elif kind == "failed" and self.failure is None:
                self.failure = Failure(message["process"], message["code"], message["text"])
                self._send({"kind": "heard"})
                if self._begun:
                    args = (self.failure,)
                    threading.Thread(target=self._on_failure, args=args, daemon=True).start()
            self._changed.notify_all()

    # --- together ---

    def gather(self, what: str, text: str) -> list[str]:
        """The texts of all processes, in their order, in all of them.

        All call this in the same order, saying the same of `what` it is for.

        Raises:
          PeerLost: a process has failed.
        """
        number, self._number = self._number, self._number + 1
        self._tell({"kind": "text", "number": number, "what": what, "text": text})
        with self._changed:
            self._changed.wait_for(lambda: number in self._texts or self.failure)
            if number in self._texts:
                return self._texts.pop(number)
        raise self.lost()

    def stop_requested(self) -> str | None:
        """The name of a signal that came to any process, or None; the same in all.

        To be called equally often in all processes. They agree in the background: the first call
        that none of them has made yet is the one that answers with the name.

        Raises:
          PeerLost: a process has failed.
        """
        if not self._asked and (name := signals.received()):
            self._asked = True
            self._tell({"kind": "stop", "name": name})
        with self._changed:
            if self._hold:
                self._changed.wait_for(lambda: not self._hold or self.failure)
            if self.failure is not None:
                raise self.lost()
            if self._stop is not None and self._calls >= self._stop[0]:
                return self._stop[1]
            self._calls += 1
        return None

    def lost(self) -> PeerLost:
        """The failure as an exception to raise."""
        assert self.failure is not None
        return PeerLost(f"{self.failure.text}; start all processes again to go on")

    # --- ending ---

    def wait_failure(self, seconds: float) -> bool:
        """Whether another process has failed by now, or does so soon."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self.failure is not None, seconds))

    def fail(self, code: int, text: str) -> bool:
        """Tells the others that this process ends with `code`; returns whether process 0 knows."""
        if self._hub is None and not self._begun and self._waiting_for is None:
            return False  # It has not answered yet.
        self._tell({"kind": "fail", "code": code, "text": text})
        with self._changed:
            self._changed.wait_for(lambda: self._noted or self.failure, 5)
            return self._noted or (self.failure is not None and self.failure.code != LOST)

    def wait_heard(self, seconds: float) -> None:
        """In process 0, returns when all have heard of the failure."""
        if self._hub is not None:
            self._hub.wait_heard(seconds)

    def end(self) -> None:
        """Waits until all processes have come to their end. Raises PeerLost if one fails first."""
        self._end = self._number
        self.gather(END, "")

    def close(self) -> None:
        """Goes. After `end`: process 0 last, for it passes on what the others say to JAX.

        Again and again is fine.
        """
        if self._loop.is_closed():
            return
        if self._hub is not None and self._ended:
            self._hub.wait_gone(10)
        with contextlib.suppress(TimeoutError):
            self._run(self._close()).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()

    async def _close(self) -> None:
        if self._writer is not None and self._ended:
            self._send({"kind": "bye"})
            with contextlib.suppress(OSError):
                await self._writer.drain()
        if self._relay is not None:
            self._relay.close()
        if self._hub is not None and self._hub.server is not None:
            self._hub.server.close()
        # Again and again: until Python 3.12 `wait_for` may lose a cancellation.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=0.1)
