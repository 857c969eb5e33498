"""Limit of the output that is kept of a job while it runs: its oldest part gives its blocks back.

The file keeps its length, so that whoever writes goes on, and the places of all that is kept stay the same.
"""

from __future__ import annotations

import ctypes
import os
import stat
from contextlib import closing, suppress

KEPT_BYTES = 2**30
"""Most bytes of output that are kept of a job."""

STEP_BYTES = 2**20
"""Blocks of every file system are whole parts of this."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)


def cut(path: str) -> bool:
    """Drop the oldest part of a file that has more than `KEPT_BYTES`; return whether it was too long.

    A quarter more is dropped than has to be, so that it does not come at every look. Raises `OSError`, also
    on a file system that cannot do so.
    """
    with closing(os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "r+b")) as file:
        found = os.fstat(file.fileno())
        length = (found.st_size - KEPT_BYTES * 3 // 4) // STEP_BYTES * STEP_BYTES
        if not stat.S_ISREG(found.st_mode) or found.st_blocks * 512 <= KEPT_BYTES or length <= 0:
            return False
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (_KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(length))
        if libc.fallocate(file.fileno(), *arguments) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        return True


def kept_part(path: str) -> tuple[int, int]:
    """Return the place of the first byte that is kept of a file, and its length."""
    with suppress(OSError):  # there is none, it is empty, or no file
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return os.lseek(descriptor, 0, os.SEEK_DATA), os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    return 0, 0
