"""Making things before they are asked for: one turn ahead, or in a thread."""

import collections
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any


def ahead(items: Iterable[Any]) -> Iterator[Any]:
    """Makes each item one turn before it is asked for."""
    waiting: collections.deque[Any] = collections.deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > 1:
            yield waiting.popleft()
    yield from waiting


class Prefetch:
    """Makes items in a thread, two ahead: an iterator's `next` may take as long as a step."""

    def __init__(self, items: Iterator[Any]):
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
        self._free = threading.Semaphore(2)
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(items,), daemon=True)
        self._thread.start()

    def _run(self, items: Iterator[Any]) -> None:
        try:
            while self._free.acquire() and not self._closed:
                self._queue.put((next(items), None))
        except BaseException as error:  # Raised again where the items are used.
            self._queue.put((None, error))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item, error = self._queue.get()
        if error is not None:
            self._queue.put((None, error))
            raise error
        self._free.release()
        return item

    def close(self) -> None:
        """Ends the thread after the item that it is making."""
        self._closed = True
        self._free.release()
        self._thread.join()
