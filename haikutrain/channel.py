"""Messages between a process and one that it started, over a pair of sockets."""

import errno
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEAD = struct.Struct("<qq")  # Bytes, and descriptors that come with them.


def send(connection: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    """Sends what pickle can, and open files; OSError if the other side has ended."""
    data = pickle.dumps(message)
    head = _HEAD.pack(len(data), len(files))
    # All of so few bytes is sent at once.
    socket.send_fds(connection, [head], files)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """A message, and the descriptors that came with it; EOFError if the other side has ended."""
    head, files, _, _ = socket.recv_fds(connection, _HEAD.size, 8)
    if len(head) < _HEAD.size:
        head += _read(connection, _HEAD.size - len(head))
    size, count = _HEAD.unpack(head)
    if len(files) != count:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return pickle.loads(_read(connection, size)), files


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
