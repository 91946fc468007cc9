"""What processes say to each other over TCP: frames of JSON, and pipes for another protocol."""

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
from typing import Any

from haikutrain.errors import UsageError

Message = dict[str, Any]

_LENGTH = 4
_LONGEST = 1 << 28


@dataclasses.dataclass(frozen=True)
class Address:
    """Where process 0 listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Of `HOST:PORT`; raises UsageError."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(
                f"--coordinator_address={text}: write HOST:PORT, the port from 1 to 65535"
            )
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def bind(self) -> str | None:
        """The interface to listen on: loopback for a job on loopback; None means all."""
        # Not by looking the name up: many machines call themselves 127.0.1.1.
        if self.host == "localhost":
            return "127.0.0.1"
        return self.host if self.host == "::1" or self.host.startswith("127.") else None


class Garbled(ValueError):
    """What arrived is no frame of ours."""


def frame(message: Message) -> bytes:
    """The bytes of one message: their number, big-endian, and JSON."""
    text = json.dumps(message).encode()
    return len(text).to_bytes(_LENGTH, "big") + text


async def read_frame(reader: asyncio.StreamReader) -> Message:
    """The next message.

    Raises:
      EOFError: the other side has closed the connection.
      Garbled: the other side speaks another language.
    """
    length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
    if length > _LONGEST:
        raise Garbled(f"a frame of {length} bytes")
    try:
        message = json.loads(await reader.readexactly(length))
    except ValueError as error:
        raise Garbled("not JSON") from error
    if not isinstance(message, dict):
        raise Garbled("not an object")
    return message


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def pipe(client: Streams, server: Streams) -> None:
    """Passes bytes on in both directions, until both connections have ended.

    When the client goes, the server is told. When the server goes, the client is not: it must not
    take that for a reason to end as well.
    """

    async def to_server() -> None:
        await _pump(client[0], server[1])
        server[1].close()

    await asyncio.gather(to_server(), _pump(server[0], client[1]))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


def watch(writer: asyncio.StreamWriter) -> None:
    """Lets the kernel end a connection within 40 s of the death of the machine behind it."""
    own: socket.socket = writer.get_extra_info("socket")
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux.
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def reason(error: OSError) -> str:
    """Why a connection failed, in the system's words."""
    # asyncio puts addresses into the text.
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
