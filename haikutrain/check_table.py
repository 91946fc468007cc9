"""What a check found, as rows of a table for people."""

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence

HELD, BROKEN, UNCHECKED, MEASURED = "held", "BROKEN", "not checked", "measured"

_WHAT, _RESULT, _TEXT = 34, 11, 72


@dataclasses.dataclass(frozen=True)
class Row:
    """One promise, and what became of it."""

    what: str
    """The promise, or what was measured."""
    result: str
    """`held`, `BROKEN`, `not checked` or `measured`."""
    where: str
    """The leaf, field or module that it is about, and what was seen there."""
    do: str = ""
    """The likely cause, and what to do; empty where nothing is to be done."""


def held(what: str, where: str) -> Row:
    """The promise holds."""
    return Row(what, HELD, where)


def broken(what: str, where: str, do: str) -> Row:
    """The promise does not hold."""
    return Row(what, BROKEN, where, do)


def unchecked(what: str, why: str, do: str = "") -> Row:
    """Nothing can be said, and why."""
    return Row(what, UNCHECKED, why, do)


def measured(what: str, value: str) -> Row:
    """A figure rather than a promise."""
    return Row(what, MEASURED, value)


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first few of many names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def table(rows: Iterable[Row]) -> str:
    """The rows, aligned, and how many there are of each result in the last line."""
    rows = list(rows)
    lines = [_line("promise", "result", "where"), _line("", "", "  what to do"), ""]
    for row in rows:
        text = _wrapped(row.where, _TEXT) or [""]
        text += [f"  {line}" for line in _wrapped(row.do, _TEXT - 2)]
        what = _wrapped(row.what, _WHAT)
        for i in range(max(len(text), len(what))):
            lines.append(
                _line(
                    what[i] if i < len(what) else "",
                    row.result if i == 0 else "",
                    text[i] if i < len(text) else "",
                )
            )
    counts = {result: sum(row.result == result for row in rows) for result in (HELD, BROKEN)}
    left = sum(row.result == UNCHECKED for row in rows)
    lines += ["", f"{counts[HELD]} held, {counts[BROKEN]} broken, {left} not checked"]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _line(what: str, result: str, text: str) -> str:
    return f"{what:{_WHAT}}  {result:{_RESULT}}  {text}".rstrip()
