"""Process 0's side of a job: it lets the others in, passes on what they say, notices who dies."""

import asyncio
import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable

from haikutrain.wire import Garbled, Message, frame, pipe, read_frame, watch

HELLO = "haikutrain"
"""The key of the first message of every connection."""
END = "the end"
"""What the last gathering is for: after it, who goes is not missed."""
HEARTBEAT = 10.0
"""Seconds from one sign of life to the next."""
SILENCE = 100.0
"""Seconds without a sign of life after which a process counts as lost."""
LOST = 75
"""The exit code of a job that a process was lost of."""


@dataclasses.dataclass
class _Gathering:
    what: str
    texts: dict[int, str] = dataclasses.field(default_factory=dict)


class Hub:
    """Where all processes of a job meet. All methods but those that wait run in its event loop.

    Args:
      count: the processes of the job, this one included.
      deliver: is given what all processes are told, for this one.
    """

    def __init__(self, count: int, deliver: Callable[[Message], None]):
        self._count = count
        self._deliver = deliver
        self._members: dict[int, asyncio.StreamWriter] = {}
        self._unheard: set[int] = set()
        self._all_heard = threading.Event()
        self._gatherings: dict[int, _Gathering] = {}
        self._calls: dict[int, int] | None = None
        self._stop_name = ""
        self._all_gone = threading.Event()
        self._begun = self._failed = self._ended = False
        self.server: asyncio.Server | None = None
        self._beats: asyncio.Task[None] | None = None
        with contextlib.closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.native_port: int = free.getsockname()[1]
            """Where JAX's own coordinator of this job is to listen, on loopback."""

    async def serve(self, host: str | None, port: int) -> None:
        """Starts to listen; raises OSError if that cannot be."""
        self.server = await asyncio.start_server(self._welcome, host, port)
        self._beats = asyncio.ensure_future(self._beat())

    def missing(self) -> list[int]:
        """The processes that have not come yet."""
        return [i for i in range(1, self._count) if i not in self._members]

    def wait_heard(self, seconds: float) -> None:
        """Returns when every other process has heard of the failure, or is gone."""
        self._all_heard.wait(seconds)

    def wait_gone(self, seconds: float) -> None:
        """Returns when every other process has gone."""
        self._all_gone.wait(seconds)

    # --- connections ---

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await asyncio.wait_for(read_frame(reader), HEARTBEAT)
            if hello.get(HELLO) == "relay":
                await pipe((reader, writer), await self._native())
            elif hello.get(HELLO) == "member":
                await self._member(int(hello["index"]), int(hello["count"]), reader, writer)
        except (OSError, EOFError, Garbled, KeyError, ValueError, TypeError):
            pass  # A stranger, or one that is gone already.
        except asyncio.CancelledError:
            pass  # At the end of the job.
        finally:
            writer.close()

    async def _native(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to JAX's coordinator, which may begin to listen a little later."""
        for _ in range(600):
            with contextlib.suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", self.native_port)
            await asyncio.sleep(0.1)
        raise TimeoutError

    async def _member(
        self, index: int, count: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if refusal := self._refusal(index, count):
            # A mistake in the launch, unless an earlier job is about to end here.
            writer.write(frame({"kind": "refused", "text": refusal, "final": not self._begun}))
            await writer.drain()
            if not self._begun:
                self._fail(index, 2, refusal)
            return
        watch(writer)
        self._members[index] = writer
        self._admit()
        clean = False
        try:
            while not clean:
                message = await asyncio.wait_for(read_frame(reader), SILENCE)
                clean = message.get("kind") == "bye"
                self.handle(index, message)
        except TimeoutError:
            self._drop(index, f"process {index} gave no sign of life for {SILENCE:.0f} seconds")
        except (OSError, EOFError, Garbled, KeyError, TypeError):
            self._drop(index, f"process {index} died")
        else:
            self._drop(index, None)

    def _refusal(self, index: int, count: int) -> str | None:
        if count != self._count:
            return (
                f"process {index} was started with --num_processes={count} and process 0 with "
                f"{self._count}; give all processes the same number"
            )
        if index in self._members or index == 0:
            return (
                f"two processes of the job were started with --process_id={index}; give each its "
                f"own, from 0 to {count - 1}"
            )
        return None

    def _admit(self) -> None:
        missing = self.missing()
        self._begun = not missing
        self.broadcast({"kind": "begin"} if self._begun else {"kind": "waiting", "for": missing})

    async def _beat(self) -> None:
        while True:
            self.broadcast({"kind": "alive"})
            await asyncio.sleep(HEARTBEAT)

    def _drop(self, index: int, died: str | None) -> None:
        del self._members[index]
        self._heard(index)
        if not self._members:
            self._all_gone.set()
        if died is not None and not self._ended:
            self._fail(index, LOST, died)

    # --- messages ---

    def broadcast(self, message: Message) -> None:
        """Tells all processes."""
        for writer in self._members.values():
            writer.write(frame(message))
        self._deliver(message)

    def handle(self, index: int, message: Message) -> None:
        """Takes what process `index` says."""
        kind = message["kind"]
        if kind == "text":
            self._gather(index, message)
        elif kind == "fail":
            self._fail(index, message["code"], message["text"])
            self._tell(index, {"kind": "noted"})
        elif kind == "heard":
            self._heard(index)
        elif kind == "stop" and self._calls is None:
            self._calls, self._stop_name = {}, message["name"]
            self.broadcast({"kind": "hold"})
        elif kind == "calls" and self._calls is not None:
            self._calls[index] = message["calls"]
            if len(self._calls) == self._count:
                last = max(self._calls.values())
                self.broadcast({"kind": "stop_at", "call": last, "name": self._stop_name})

    def _tell(self, index: int, message: Message) -> None:
        if index == 0:
            self._deliver(message)
        elif index in self._members:
            self._members[index].write(frame(message))

    def _gather(self, index: int, message: Message) -> None:
        number, what = message["number"], message["what"]
        gathering = self._gatherings.setdefault(number, _Gathering(what))
        if what != gathering.what:
            self._fail(
                index,
                1,
                f"the processes of the job do not do the same: process {index} is at {what!r}, "
                f"others are at {gathering.what!r}",
            )
            return
        gathering.texts[index] = message["text"]
        if len(gathering.texts) == self._count:
            texts = [gathering.texts[i] for i in range(self._count)]
            del self._gatherings[number]
            self._ended = what == END
            self.broadcast({"kind": "texts", "number": number, "texts": texts})

    def _fail(self, index: int, code: int, text: str) -> None:
        """The first failure ends the job; those that follow from it are not passed on."""
        if not self._failed:
            self._failed = True
            self._unheard = set(self._members)
            self.broadcast({"kind": "failed", "process": index, "code": code, "text": text})
            self._heard(index)

    def _heard(self, index: int) -> None:
        self._unheard.discard(index)
        if self._failed and not self._unheard:
            self._all_heard.set()
