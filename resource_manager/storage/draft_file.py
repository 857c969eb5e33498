"""Drafts of files, renamed into place when they are whole."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def create_draft(path: Path, mode: int = 0o666) -> tuple[int, Path]:
    """Create an empty file beside `path` and return its handle and its own path; raises `OSError`.

    Its mode is `mode` less the umask: who keeps new files to themselves keeps these too.
    """
    draft = path.with_name(f".{path.stem}-{secrets.token_hex(4)}{path.suffix}")
    try:
        return os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), draft
    except OSError as error:
        error.filename = str(path)  # whoever asked knows no other name
        raise
