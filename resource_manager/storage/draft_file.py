"""Files that are written as drafts, renamed into place when they are whole."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[TextIO]:
    """Yield a file that takes the place of `path` at the end, or not at all; raises `OSError`.

    Its mode is `mode` less the umask: who keeps new files to themselves keeps these too.
    """
    draft = path.with_name(f".{path.stem}-{secrets.token_hex(4)}{path.suffix}")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        error.filename = str(path)  # whoever asked knows no other name
        raise
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield file
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
