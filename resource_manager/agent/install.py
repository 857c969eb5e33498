"""Installation of the agent on the machine where this runs: standard library only, Python 3.9 or newer.

This file is sent to `python3 -` on a server, with a call of `install` after it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

FOLDER = "/opt/gpu-manager-agent"
SETTINGS = "/etc/gpu-manager/agent.env"
UNIT = "gpu-manager-agent.service"
PYTHON = "/usr/bin/python3"


def install(program: str, files: dict[str, str], settings: str, unit: str) -> None:
    """Write files, settings and unit, and start the unit anew; `program` is this one, for root.

    Lines of the settings that somebody added stay.
    """
    if shutil.which("systemctl") is None:
        sys.exit("it has no systemctl: have its own init keep gpu-manager agent --server NAME --url URL")
    if os.geteuid() != 0:
        if shutil.which("sudo") is None:
            sys.exit("its user is not root, and there is no sudo: --user root")
        done = subprocess.run(["sudo", "-n", sys.executable, "-"], input=program, text=True)
        sys.exit(done.returncode)
    for name, text in files.items():
        _write(f"{FOLDER}/{name}", text, 0o644)
    _write(SETTINGS, settings + _added(settings), 0o600)
    python = PYTHON if os.path.exists(PYTHON) else sys.executable
    _write(f"/etc/systemd/system/{UNIT}", unit.replace(PYTHON, python), 0o644)
    for words in (["daemon-reload"], ["enable", UNIT], ["restart", UNIT]):
        done = subprocess.run(["systemctl", *words], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"systemctl {words[0]}: {done.stderr.strip()}")


def _added(settings: str) -> str:
    """Return the lines of the settings on this machine whose names are not among the new ones."""
    own = tuple(f"{line.partition('=')[0]}=" for line in settings.splitlines())
    try:
        with open(SETTINGS, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return ""
    return "".join(f"{line}\n" for line in lines if not line.lstrip().startswith(own))


def _write(path: str, text: str, mode: int) -> None:
    """Write a file in one step, for its readers and for whoever must not read it."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    draft = f"{path}.new"
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
    os.replace(draft, path)
