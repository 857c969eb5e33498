"""Copy of a folder of code on the server of a lease: what git would not ignore, and only what changed."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import socket
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from resource_manager.cli.base import BAD_INPUT, Failure
from resource_manager.cli.session import say
from resource_manager.jobs.launchers import LauncherError
from resource_manager.jobs.launchers.terminal import SSH_OPTIONS, destination

MAX_BYTES = 100_000_000

THERE = """
import hashlib, json, os, sys, tarfile
folder = os.path.realpath(os.path.expanduser(sys.argv[1]))
os.makedirs(folder, mode=0o700, exist_ok=True)
os.chdir(folder)
known, new = folder + ".files", "%s.%d" % (folder, os.getpid())
wanted = json.loads(sys.stdin.buffer.readline())
def is_link(parent):
    return os.path.realpath(parent) != os.path.normpath(os.path.join(folder, parent))
def is_file(name):  # and no pipe, device or link in its place, as a job may have made
    return os.path.isfile(name) and not os.path.islink(name)
def is_in_place(name):
    return is_file(name) and not is_link(os.path.dirname(name))
def digest(name):
    try:
        if not is_file(name):
            return ""
        whole = hashlib.sha256()
        with open(name, "rb") as file:
            for part in iter(lambda: file.read(1048576), b""):  # it may be a job's checkpoint
                whole.update(part)
        return whole.hexdigest() + "x" * bool(os.stat(name).st_mode & 64)
    except OSError:
        return ""
def note(digests):
    with open(new, "w") as file:
        json.dump(digests, file)
    os.replace(new, known)
sent = {}
if is_file(known):
    with open(known) as file:
        sent = json.load(file)
    if not isinstance(sent, dict):  # a list without digests: any of these may be a job's by now
        sent = {}
    for name in set(sent) - set(wanted):
        parent = os.path.dirname(name)
        if is_in_place(name) and digest(name) == sent[name]:
            os.unlink(name)
        while parent and not is_link(parent):
            try:
                os.rmdir(parent)
            except OSError:
                break
            parent = os.path.dirname(parent)
def is_lacking(name):  # no file that was sent as it is wanted and that a job has changed since
    return not (is_in_place(name) and sent.get(name) == wanted[name]) and digest(name) != wanted[name]
lacking = [name for name in wanted if is_lacking(name)]
note({**wanted, **{name: sent.get(name) for name in lacking}})  # the archive may end too early
print("\\nlacking: " + json.dumps(lacking), flush=True)
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
    for member in archive:
        parent = os.path.dirname(member.name)
        if is_link(parent):
            sys.exit("a job has put a link in place of %s there: remove it" % parent)
        if parent:
            os.makedirs(parent, exist_ok=True)
        content = archive.extractfile(member).read()
        with open(new, "wb") as file:
            file.write(content)
        os.chmod(new, member.mode)
        os.replace(new, member.name)
note({**wanted, **{name: digest(name) for name in lacking}})  # as it arrived
print("done", flush=True)
"""
"""Program for the server: it reads the wanted files' digests, says what it lacks, and reads an archive.

What it keeps for itself is beside the folder: no file of a folder takes its place.
"""


def check_folder(folder: Path) -> dict[str, Path]:
    """Return the files of a folder that git does not ignore, by name.

    Raises `Failure` for too many, for a link that leads out of the folder, and where git fails.
    """
    return _files(folder, _listed(folder))


def _files(folder: Path, listed: Sequence[str]) -> dict[str, Path]:
    files = {name: folder / name for name in listed if (folder / name).is_file()}
    for name, path in files.items():
        if not path.resolve().is_relative_to(folder.resolve()):
            raise Failure(
                f"--sync {folder}: {name!r} is a link to {str(path.resolve())!r}, outside the folder: put "
                "the file there, or name the link in .gitignore",
                BAD_INPUT,
            )
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if sum(sizes.values()) > MAX_BYTES:
        first = sorted(sizes, key=lambda name: -sizes[name])[:3]
        largest = ", ".join(f"{name} ({sizes[name] / 1e6:,.0f} MB)" for name in first)
        raise Failure(
            f"--sync {folder}: {sum(sizes.values()) / 1e6:,.0f} MB, at most {MAX_BYTES / 1e6:g}; name in "
            f".gitignore what is data, such as {largest}",
            BAD_INPUT,
        )
    return files


def _listed(folder: Path) -> list[str]:
    """Return the names that git does not ignore: of files, and of folders that it does not look into."""
    done = _git(folder, "-C", str(folder), "ls-files", "-z", "-co", "--exclude-standard")
    if done.returncode != 0:  # no repository: the ignore files count all the same
        with tempfile.TemporaryDirectory() as empty:
            _git(folder, "init", "-q", "--bare", empty)
            place = ("--git-dir", empty, "--work-tree", str(folder), "-C", str(folder))
            done = _git(folder, *place, "ls-files", "-z", "-o", "--exclude-standard")
    if done.returncode != 0:
        said = os.fsdecode(done.stderr).strip().splitlines() or ["no reason given"]
        raise Failure(f"--sync {folder}: git does not list its files: {said[-1]}", BAD_INPUT)
    return sorted(filter(None, os.fsdecode(done.stdout).split("\0")))


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    try:
        # A repository that somebody else made may name a program there.
        return subprocess.run(["git", "-c", "core.fsmonitor=false", *words], capture_output=True)
    except FileNotFoundError:
        raise Failure(f"--sync {folder} needs git, which says what is ignored", BAD_INPUT) from None


def sync(folder: Path, address: str, options: Sequence[str]) -> tuple[str, int]:
    """Make the copy of a folder on a server equal to it; return where it is there, and the files sent.

    What jobs wrote stays, also over a file of the folder until that changes here. Files that a former copy
    brought and no job has changed go there once they are gone here. Raises `LauncherError`.
    """
    listed = _listed(folder)
    files = _files(folder, listed)
    if apart := [name for name in listed if (folder / name).is_dir()]:
        some = ", ".join(map(repr, apart[:5])) + ", …" * (len(apart) > 5)
        say(f"--sync {folder}: without {some}: submodules, other repositories and linked folders stay here")
    mark = hashlib.sha256(f"{socket.gethostname()}:{folder.resolve()}".encode()).hexdigest()[:8]
    there = f"~/.gpu-manager/code/{folder.resolve().name or 'root'}-{mark}"
    program = shlex.join(["python3", "-I", "-S", "-c", THERE, there])
    command = ["ssh", "-T", *SSH_OPTIONS, *options, *destination(address), program]
    try:
        wanted = {name: _digest(path) for name, path in files.items()}
    except OSError as error:  # another user's, or removed meanwhile
        raise LauncherError(f"--sync {folder}: not copied to {address}: {error}") from error
    with tempfile.TemporaryFile() as complaint:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaint)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process:
                process.stdin.write(json.dumps(wanted).encode() + b"\n")
                process.stdin.flush()
                lacking = _lacking(process.stdout)
                if not isinstance(lacking, list) or not {*map(str, lacking)} <= files.keys():
                    raise ValueError(lacking)
                _send(files, lacking, process)
                process.stdin.close()
                if process.stdout.readline() == b"done\n":
                    return there, len(lacking)
        except (OSError, ValueError):
            pass  # its standard error says why
        complaint.seek(0)
        said = complaint.read().decode(errors="replace").strip().splitlines() or ["no reason given"]
    raise LauncherError(f"--sync {folder}: not copied to {address}: {said[-1]}")


def _lacking(answer: IO[bytes]) -> Any:
    """Return what the server says it lacks, behind the lines of a .bashrc; raises `ValueError`."""
    left = MAX_BYTES
    while line := answer.readline(left):
        if line.startswith(b"lacking: "):
            return json.loads(line.removeprefix(b"lacking: "))
        left -= len(line)
    raise ValueError("no answer")


def _digest(path: Path) -> str:
    """Return the digest of a file as the program there computes it, of its content and whether it may run."""
    return hashlib.sha256(path.read_bytes()).hexdigest() + "x" * bool(path.stat().st_mode & stat.S_IXUSR)


def _send(files: Mapping[str, Path], names: Sequence[str], process: subprocess.Popen[bytes]) -> None:
    with tarfile.open(fileobj=process.stdin, mode="w|", dereference=True) as archive:
        for name in names:
            archive.add(files[name], name, recursive=False)
