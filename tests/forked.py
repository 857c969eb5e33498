"""A forked child, as that of a program whose threads were in the middle of something."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable


def in_child(work: Callable[[], int]) -> int:
    """Return what `work` returns in a forked child: another number if it fails, or hangs for 20 s."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python itself, since 3.12
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        code = 255
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
