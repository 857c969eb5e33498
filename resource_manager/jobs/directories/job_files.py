"""Files of jobs, bounded where they are read and never half written, their locks, and their one folder."""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import re
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import BinaryIO

DEFAULT_ROOT = "~/.gpu-manager/jobs"
CHECKPOINT = "checkpoint"
PREEMPTED = "preempted"
PREPARED = "prepared"
SIGN = "sign"
KEPT = "kept"
TOLD = "told"
BEGUN = "begun"
ENDED = "ended"
OUTSIDE = ENDED, TOLD, BEGUN
"""Folders of what is kept of a job outside of its own directory."""
ENDED_S = 86400.0
ANY = "of any lease"
STARTER_TIMEOUT_S = 10.0
LOG_CHUNK_BYTES = 256 * 1024
MAX_SHORT_BYTES = 256
MAX_TIME_S = 1e12  # as of `core.models`
KEY = re.compile(r"(?!\.\.?$)[A-Za-z0-9_.-]{1,255}")


class RefusedError(Exception):
    """The call was refused, for a reason that its caller has to tell from other errors."""


class ElsewhereError(RefusedError):
    """The job is on another machine, in another folder or another user's: its state is unknown here."""


class StillRunsError(RefusedError):
    """The job is being stopped, and not gone yet."""


class NotStartedError(RefusedError):
    """The job was not started, and no process of it runs."""


class AlreadyEndedError(NotStartedError):
    """The job was stopped, so it is not started again."""


def path_in(root: str, *names: str) -> str:
    """Return the path below a root; raises `ElsewhereError` for a key that would lead out of it."""
    if not KEY.fullmatch(names[-1]):
        raise ElsewhereError(f"no job is called {names[-1][:60]!r}")
    return os.path.abspath(os.path.join(os.path.expanduser(root), *names))


def directory_of(root: str, key: str) -> str:
    return path_in(root, key)


def lease_of_key(key: str) -> str:
    """Return a job's key without the fencing token: equal for all leases of the same id and rank."""
    return re.sub(r"-\d+(\.\d+)?$", lambda found: found[1] or "", key)


def own_directory_of(root: str, key: str) -> str:
    """Return the directory of all leases of the job's id and rank."""
    return os.path.join(path_in(root, KEPT), lease_of_key(key))


def tombstone_of(root: str, key: str) -> str:
    return path_in(root, ENDED, key)


def told_file_of(root: str, key: str) -> str:
    return path_in(root, TOLD, key)


def begun_file_of(root: str, key: str) -> str:
    """Return the file that says, outside of the job's directory, that the job was started."""
    return path_in(root, BEGUN, key)


def jobs_in(root: str) -> Iterator[str]:
    """Yield the keys of the jobs that have a directory."""
    with suppress(FileNotFoundError), os.scandir(os.path.expanduser(root)) as entries:
        for entry in entries:
            if entry.is_dir() and entry.name not in (KEPT, *OUTSIDE) and KEY.fullmatch(entry.name):
                yield entry.name


def ended_in(root: str) -> Iterator[str]:
    """Yield the keys of the jobs that have a tombstone."""
    with suppress(FileNotFoundError):
        yield from os.listdir(path_in(root, ENDED))


def bury(root: str, key: str) -> None:
    """Write the job's tombstone, and remove those that are older than a day."""
    prune_tombstones(root)
    os.makedirs(path_in(root, ENDED), mode=0o700, exist_ok=True)
    write_file(tombstone_of(root, key), "")


def prune_tombstones(root: str) -> None:
    with suppress(OSError), own_folder(path_in(root, ENDED)) as folder:  # the next call does it
        for name in () if folder is None else os.listdir(folder):
            with suppress(FileNotFoundError):  # another process prunes, too
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < time.time() - ENDED_S:
                    os.unlink(name, dir_fd=folder)


def exists(path: str) -> bool:
    """Return whether there is such a file; raises `OSError` if it cannot be known."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def own_folder(path: str) -> Iterator[int | None]:
    """Yield the descriptor of a folder of this user, or None: for none, for a link, and for another's.

    Else its owner, or who put the link there, could have a user with more rights end and remove what they
    choose, also where they exchange the folder while it is looked into.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        yield None
        return
    try:
        yield descriptor if os.fstat(descriptor).st_uid == os.geteuid() else None
    finally:
        os.close(descriptor)


def open_regular(path: str, folder: int | None = None) -> BinaryIO:
    """Open a regular file to read it; raises `FileNotFoundError` for a link, a pipe, a device or a socket.

    The path may be that in a `folder` of this descriptor.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise FileNotFoundError(errno.ENOENT, "no regular file", path) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # `fdopen` refuses a folder
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "no regular file", path)
    return os.fdopen(descriptor, "rb")


def text_of(path: str, size: int = MAX_SHORT_BYTES) -> str:
    """Return what a file of at most so many bytes says."""
    with open_regular(path) as file:
        return file.read(size).decode("utf-8", "replace")


def number_of(path: str, folder: int | None = None) -> int | None:
    """Return the number in a file, maybe of the `folder` of this descriptor; None if it has none."""
    try:
        with open_regular(path, folder) as file:
            number = int(file.read(MAX_SHORT_BYTES).decode("utf-8", "replace"))
    except (FileNotFoundError, ValueError):
        return None
    return number if abs(number) < 2**31 else None


def modified_at(path: str) -> float | None:
    """Return the time of a file; None if it has none, or one that a job has set and nobody takes."""
    with suppress(OSError):
        at = os.stat(path).st_mtime
        return at if 0 <= at <= MAX_TIME_S else None
    return None


def write_file(path: str, text: str, dated: float | None = None) -> None:
    """Write a file that no reader sees half, in place of what is there; `dated` is when it was changed."""
    new = f"{path}.{os.urandom(4).hex()}"  # a name of its own: others may write the same file now
    try:
        with open(new, "x") as file:
            file.write(text)
        if dated is not None:
            os.utime(new, (dated, dated))
        os.replace(new, path)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(new)
        raise


def machine() -> str:
    """Return what tells this machine from others: its name, which a container has too, and its id."""
    try:
        with open("/etc/machine-id") as file:
            return f"{socket.gethostname()}/{file.read().strip()}"
    except OSError:
        return socket.gethostname()


def user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # an account without a name, as in containers
        return str(os.geteuid())


def mark_of(folder: str) -> str:
    """Return the number that only this folder has; whichever process comes first writes it."""
    path = os.path.join(folder, "mark")
    with closing(os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        mark = file.read()
        if not mark:
            mark = os.urandom(16).hex()
            file.write(mark)
            file.flush()
            os.fsync(file.fileno())
    return mark


def verify(key: str, place: Mapping[str, str], here: str = "") -> None:
    """Raise `ElsewhereError` unless the job's place, as `prepare` returns it, is this machine and folder.

    `here` is what stands for the machine where several share the folder.
    """
    here, reason = here or machine(), ""
    there, asked = (name.partition("/")[0] for name in (place["machine"], here))
    if place["machine"] != here:
        reason = ", another machine of that name" if there == asked else ""
    else:
        try:
            with open_regular(os.path.join(place["folder"], "mark")) as mark:
                if mark.read(MAX_SHORT_BYTES).decode("utf-8", "replace") != place["mark"]:
                    reason = ", where that folder is another one"
                elif os.fstat(mark.fileno()).st_uid == os.geteuid():
                    return
            # Else its owner could have a user with more rights kill a process group of their choice.
        except OSError as error:
            reason = f", where that folder cannot be read: {error.strerror}"
    raise ElsewhereError(
        f"job {key} is on {there or 'no stated machine'} in {place['folder']} of user {place['user']}, but "
        f"{asked} was asked as {user_name()}{reason}: ask from there, as that user"
    )


def folder_of(root: str, user: str = "") -> str:
    """Return the folder of a root that was used by this user; raises `ElsewhereError`."""
    folder = os.path.abspath(os.path.expanduser(root))
    if user not in ("", user_name()):
        raise ElsewhereError(f"jobs of user {user} cannot be seen as {user_name()}: ask as that user")
    if not exists(os.path.join(folder, "mark")):
        raise ElsewhereError(f"{machine().partition('/')[0]} has no jobs folder {folder}")
    return folder


@contextmanager
def locked(directory: str, mode: int, create: int = 0) -> Iterator[int | None]:
    """Yield the lock's descriptor, or None while another process holds it.

    A test of the lock shares it (LOCK_SH), a start does not (LOCK_EX) and makes the file.
    """
    path = os.path.join(directory, "lock")
    try:
        descriptor = os.open(path, os.O_RDWR | create, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        descriptor = os.open(path, os.O_RDONLY)  # the disk has become read-only since
    try:
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def lock_of_unstarted(
    directory: str, names: Sequence[str] = ("group",), timeout_s: float = STARTER_TIMEOUT_S
) -> Iterator[int | None]:
    """Yield the lock's descriptor of a job that was not started, None if it was; raises `RuntimeError`.

    A job that was started has one of the files of these names.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with locked(directory, fcntl.LOCK_EX, os.O_CREAT) as lock:
            was_started = any(exists(os.path.join(directory, name)) for name in names)
            if was_started or lock is not None:
                yield None if was_started else lock
                return
        if time.monotonic() > deadline:
            raise RuntimeError(f"another process holds {directory}/lock and does not start the job")
        time.sleep(0.02)  # another process tests the lock or is starting the job


def is_free(directory: str) -> bool:
    try:
        with locked(directory, fcntl.LOCK_SH) as lock:
            return lock is not None
    except FileNotFoundError:  # not started, or another process has just stopped the job
        return True
