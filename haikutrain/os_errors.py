"""The operating system's error behind an exception: its number, and its words for people."""

import errno
import os
import re

# A file is not there, or something else stands in its place. Any other error in reading (no
# permission, a failing device, a server that is gone) says nothing about what is in the file.
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


def number(error: BaseException) -> int | None:
    """The `errno` that an exception, or one that led to it, stands for; None if there is none."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.errno is not None:
            return link.errno
        # TensorStore raises ValueErrors that have it in their text.
        if found := re.search(r"os_error_code='(\d+)'", str(link)):
            return int(found[1])
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return None


def reason(error: BaseException) -> str:
    """Why something failed, in one line: `No space left on device`, else the error's own words."""
    found = number(error)
    if found is not None:
        return os.strerror(found)
    return str(error).strip().split("\n")[0] or type(error).__name__


def is_of_a_disk(error: BaseException) -> bool:
    """Whether a file could not be written for want of room, or of permission."""
    return number(error) in _DISK


def is_missing_file(error: BaseException) -> bool:
    """Whether a file is missing, or is no file: what was written is not there."""
    return number(error) in _MISSING


def is_from_outside(error: BaseException) -> bool:
    """Whether a file could not be read for a reason that is not in the file."""
    return number(error) is not None and not is_missing_file(error)
