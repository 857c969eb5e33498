"""Stand-in for NVIDIA's library: compile it, and write the state from which it answers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("libnvidia_ml.c")
COMPILER = shutil.which("cc") or shutil.which("gcc")


def compile_library(folder: Path, *flags: str) -> Path:
    """Compile the stand-in as `libnvidia-ml.so.1` in the folder; skip the test without a C compiler."""
    if COMPILER is None:
        pytest.skip("needs a C compiler (Debian: gcc)")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", *flags]
    subprocess.run([COMPILER, *options, "-o", library, SOURCE, "-lpthread"], check=True)
    return library


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled stand-in; import this fixture by name where it is used."""
    return compile_library(tmp_path_factory.mktemp("nvml"))


def uuid_of(number: int, prefix: str = "GPU") -> str:
    return f"{prefix}-8f6a2c1e-0000-4000-8000-{number:012d}"


def gpu(number: int, *lines: str) -> list[str]:
    """Return the lines of an A100 with 80 GiB, idle and healthy; `lines` are added in front and so win."""
    return [
        "gpu",
        *lines,
        f"uuid {uuid_of(number)}",
        "name NVIDIA A100-SXM4-80GB",
        f"pci 00000000:{7 + 8 * number:02X}:00.0",
        "memory 85899345920 0 637534208",
        "utilization 0 0",
        "temperature 34",
        "power 61250",
        "energy 123456789",
        "ecc 0",
        "rows 0 0 0 0",
        "clocks 0x1",
        f"numa {number // 4}",
        "recovery 0",
        "capability 8 0",
        "mig_mode 0",
    ]


def mig(number: int, profile: str, gib: int, *lines: str) -> list[str]:
    """Return the lines of a MIG device of the GPU before it."""
    slices = profile.partition("g.")[0]
    return [
        "mig",
        *lines,
        f"uuid {uuid_of(number, 'MIG')}",
        f"name NVIDIA A100-SXM4-80GB MIG {profile}",
        f"memory {gib * 2**30} 0",
        f"instance {number + 7} 0",
        f"slices {slices} {slices}",
    ]


class State:
    """State file of the stand-in, rewritten in one step."""

    def __init__(self, path: Path, library: Path) -> None:
        self.path = path
        self.library = library
        self.write(gpu(0), gpu(1))

    def write(self, *parts: Sequence[str], machine: Sequence[str] = ()) -> None:
        lines = ["driver 550.54.15", "cuda 12040", *machine, *(line for part in parts for line in part)]
        new = self.path.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.path)

    @property
    def variables(self) -> dict[str, str]:
        """Environment in which the probe uses the stand-in with this state."""
        return {"GPU_MANAGER_NVML": str(self.library), "NVML_STATE": str(self.path)}

    @property
    def environment(self) -> dict[str, str]:
        """Whole environment in which any program finds the stand-in by its usual name."""
        return {**os.environ, **self.variables, "LD_LIBRARY_PATH": str(self.library.parent)}


@pytest.fixture
def state(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """A state with two GPUs, and this process's environment set to it; import this fixture by name."""
    made = State(tmp_path / "nvml-state", library)
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    return made
