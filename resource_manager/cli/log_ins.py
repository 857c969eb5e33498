"""Log-ins of this user on this machine: the token at each service, in a file that only they may read."""

from __future__ import annotations

import json
from typing import Any

from resource_manager.errors import SettingsError
from resource_manager.rest.private_file import PrivateFile, config_folder


def token_of(url: str) -> str | None:
    """Return the token of the log-in at the service, None if there is none; raises `SettingsError`."""
    entry = _read(_file()).get(_key(url), {})
    return entry.get("token") if isinstance(entry, dict) else None


def keep(url: str, log_in: dict[str, Any] | None) -> None:
    """Keep the log-in at the service in the place of another; None removes it."""
    file = _file()
    file.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file.exclusive():
        others = {name: entry for name, entry in _read(file).items() if name != _key(url)}
        file.write(json.dumps(others if log_in is None else {**others, _key(url): log_in}, indent=1))


def _file() -> PrivateFile:
    return PrivateFile(config_folder() / "log-ins.json", secret=True)


def _key(url: str) -> str:
    return url.rstrip("/")


def _read(file: PrivateFile) -> dict[str, Any]:
    try:
        found = json.loads(file.read() or "{}")
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{file.path}: not a file of log-ins; remove it and log in again") from error
    return found if isinstance(found, dict) else {}
