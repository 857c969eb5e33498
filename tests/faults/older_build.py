"""An older build of the package: a copy that does not know the change of maintenance windows."""

from __future__ import annotations

import shutil
from pathlib import Path

import resource_manager


def older_build(folder: Path) -> Path:
    """Make the build in the folder, as an unpacked wheel, and return the folder."""
    package = Path(resource_manager.__file__).parent
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    codec = folder / package.name / "storage" / "codec.py"
    known = "for kind in get_args(Change)}"
    text = codec.read_text()
    assert text.count(known) == 1
    codec.write_text(text.replace(known, f"{known[:-1]} if kind.__name__ != 'MaintenanceChanged'}}"))
    return folder
