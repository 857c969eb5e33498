"""Settings from environment and file; a wrong one is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resource_manager import GPUResourceManager
from resource_manager.errors import SettingsError
from resource_manager.settings import Settings


def test_environment_overrides_file_overrides_default(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('store = "memory://"\npolicy = "best_fit"\n')
    settings = Settings.load(
        {"GPU_MANAGER_SETTINGS": str(path), "GPU_MANAGER_POLICY": "random", "GPU_MANAGER_LEASE_TTL_S": "90"}
    )
    assert (settings.store, settings.policy, settings.lease_ttl_s, settings.order) == (
        "memory://",
        "random",
        90.0,
        "priority",
    )


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"GPU_MANAGER_LEASE_TTL_S": "soon"}, "GPU_MANAGER_LEASE_TTL_S"),
        ({"GPU_MANAGER_LEASE_TTL_S": "-1"}, "GPU_MANAGER_LEASE_TTL_S"),
        (
            {"GPU_MANAGER_MIN_GPUS": "9", "GPU_MANAGER_MAX_GPUS": "8"},
            r"min_gpus \(9\) is above max_gpus \(8\)",
        ),
        ({"GPU_MANAGER_MAX_GPUS": "0"}, "GPU_MANAGER_MAX_GPUS"),
        ({"GPU_MANAGER_SETTINGS": "/no/such/file.toml"}, "GPU_MANAGER_SETTINGS"),
    ],
)
def test_a_wrong_setting_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        Settings.load(environ)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("polciy = 'best_fit'", "'polciy': Extra inputs are not permitted"),
    ],
)
def test_a_wrong_setting_in_the_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f"{text}\n")
    with pytest.raises(SettingsError, match=f"^setting {named}"):
        Settings.load({"GPU_MANAGER_SETTINGS": str(path)})


@pytest.mark.parametrize("wrong", [{"lease_ttl_s": -1}, {"colour": "red", "lease_ttl_s": -1}])
def test_a_wrong_argument_of_a_manager_is_named_in_one_line(wrong: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=r"^setting '\w+': .+$") as caught:
        GPUResourceManager.from_url("memory://", **wrong)
    assert "\n" not in str(caught.value)


def test_airflows_configuration_is_read_in_its_processes_after_the_environment(tmp_path: Path) -> None:
    sections = (
        {"store": "redis://r:1/0", "order": "srtf", "lease_ttl_s": "60"},
        {"lease_ttl_s": "-1"},
        {"stroe": "x"},
    )
    code = (
        "import airflow.configuration, os\n"
        "from resource_manager.settings import Settings\n"
        f"for section in {sections}:\n"
        "    names = {f'AIRFLOW__GPU_MANAGER__{name.upper()}': value for name, value in section.items()}\n"
        "    os.environ.update(names)\n"
        "    try:\n"
        "        found = Settings.load()\n"
        "        print(found.store, found.lease_ttl_s, found.order)\n"
        "    except Exception as error:\n"
        "        print(error)\n"
        "    for name in names:\n"
        "        del os.environ[name]"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    given = {"PATH": os.environ["PATH"], "AIRFLOW_HOME": str(tmp_path), "GPU_MANAGER_ORDER": "fifo"}
    said = subprocess.run(command, env=given, check=True, capture_output=True, text=True).stdout.splitlines()
    assert said[0] == "redis://r:1/0 60.0 fifo"
    assert said[1].startswith("[gpu_manager] lease_ttl_s of airflow.cfg: ")
    assert said[2].startswith("[gpu_manager] stroe of airflow.cfg: ")
    assert len(said) == 3
