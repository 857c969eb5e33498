"""Files of the service that only its own user may change: tokens, sessions, the secret that signs them."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resource_manager.errors import SettingsError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_READ = stat.S_IRGRP | stat.S_IROTH


def config_folder() -> Path:
    """Return the folder of this user's files."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "gpu-manager"


def secret_in(path: Path | None) -> str:
    """Return the secret in a file that only this user may read, empty if none is named.

    Raises `SettingsError`, also if there is no file or none in it.
    """
    if path is None:
        return ""
    text = PrivateFile(path, secret=True).read()
    if text is None:
        raise SettingsError(f"{path}: no such file")
    secret = text.strip()
    if not secret:
        raise SettingsError(f"{path}: there is no secret in it")
    return secret


class PrivateFile:
    """Text file of this process's user that others may not change; nor read if it is `secret`.

    Whoever could put another file in its place could act as any caller, so its owner must be this user or
    root (who mounts it in a container, readable for a group of this user).
    """

    def __init__(self, path: Path, *, secret: bool = False) -> None:
        self.path = path
        self._forbidden_mode = OTHERS_WRITE | OTHERS_READ if secret else OTHERS_WRITE

    def read(self) -> str | None:
        """Return the text, or None without the file; raises `SettingsError` if others may have written it."""
        try:
            stream = self.path.open(encoding="utf-8-sig")  # editors of Windows begin it with a mark
        except FileNotFoundError:
            return None
        with stream:
            found = os.fstat(stream.fileno())
            if found.st_uid not in (0, os.geteuid()):
                raise SettingsError(
                    f"{self.path} belongs to another user (uid {found.st_uid}): "
                    f"if you trust what is in it, chown it to uid {os.geteuid()}, else remove it"
                )
            is_own = found.st_uid == os.geteuid()
            if found.st_mode & (self._forbidden_mode if is_own else self._forbidden_mode & ~stat.S_IRGRP):
                verb = "changed" if found.st_mode & OTHERS_WRITE else "read"
                # this user reads a file of root by its group: its owner alone would lock the service out
                remedy = "chmod 600" if is_own else "chmod 640 and chgrp it to a group of this user"
                raise SettingsError(
                    f"{self.path} may be {verb} by others (mode {stat.S_IMODE(found.st_mode):o}): "
                    f"if you trust what is in it, {remedy}, else remove it"
                )
            try:
                return stream.read()
            except UnicodeDecodeError as error:
                raise SettingsError(f"{self.path} is not UTF-8 text: {error}") from error

    def create(self, text: str) -> str:
        """Write the text if there is no file yet; return what is in the file then."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.exclusive():
            found = self.read()
            if found is None:
                self.write(text)
            return text if found is None else found

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclude other writers of the folder, so that none writes back what another has removed."""
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def write(self, text: str) -> None:
        """Replace the whole file or leave it as it was; of a link, the file that it names."""
        from resource_manager.storage.draft_file import replacing  # imports all stores

        with replacing(self.path.resolve(), 0o600) as file:
            file.write(text)
