"""Files that are written as drafts, renamed into place when they are whole."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def draft_of(path: Path, mode: int = 0o666) -> Iterator[tuple[int, Path]]:
    """Yield handle and path of a new file that takes the place of `path` at the end, or not at all.

    Its mode is `mode` less the umask: who keeps new files to themselves keeps these too. Raises `OSError`
    with the name `path`, also for a device, pipe or folder, which root would replace, and for `-`, by which
    most people mean standard output.
    """
    draft = path.parent / f".{path.stem}-{secrets.token_hex(4)}{path.suffix}"
    try:
        is_device = path.parent == Path("/dev") or str(path) == "-"  # /dev/stdout may be a file
        if is_device or (path.exists() and not path.is_file()):
            raise OSError(errno.EINVAL, "not a plain file")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            yield handle, draft
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        if error.filename in (None, str(draft)):  # whoever asked knows no other name
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[TextIO]:
    """Yield a text file that takes the place of `path` as `draft_of` says; raises `OSError`."""
    with draft_of(path, mode) as (handle, _), os.fdopen(handle, "w", encoding="utf-8") as file:
        yield file
