"""Settings from environment and file; a wrong one is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resource_manager import GPUResourceManager
from resource_manager.errors import ResourceManagerError, SettingsError
from resource_manager.settings import Settings


def test_environment_overrides_file_overrides_default(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('\ufeffstore = "memory://"\ncache_ttl_s = 1\n')  # with a byte order mark, of some editors
    settings = Settings.load({"GPU_MANAGER_SETTINGS": str(path), "GPU_MANAGER_CACHE_TTL_S": "90"})
    assert (settings.store, settings.cache_ttl_s, settings.lock_timeout_s) == ("memory://", 90.0, 60.0)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"GPU_MANAGER_LOCK_TIMEOUT_S": "soon"}, "GPU_MANAGER_LOCK_TIMEOUT_S"),
        ({"GPU_MANAGER_LOCK_TIMEOUT_S": "-1"}, "GPU_MANAGER_LOCK_TIMEOUT_S"),
        ({"GPU_MANAGER_SETTINGS": "/no/such/file.toml"}, "/no/such/file.toml: No such file"),
        ({"GPU_MANAGER_SETTINGS": __file__}, f"^GPU_MANAGER_SETTINGS={__file__}: not TOML: "),
    ],
)
def test_a_wrong_setting_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        Settings.load(environ)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("polciy = 'best_fit'", "'polciy': there is no such setting"),
        ("lock_timeout_s = true", "'lock_timeout_s': must be a number, got True"),
    ],
)
def test_a_wrong_setting_in_the_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f"{text}\n")
    with pytest.raises(SettingsError, match=f"^setting {named}"):
        Settings.load({"GPU_MANAGER_SETTINGS": str(path)})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"lease_ttl_s": -1}, "lease_ttl_s: "),
        ({"lock_timeout_s": -1}, "setting 'lock_timeout_s': must be greater than 0"),
        ({"lock_timeout_s": "inf"}, "setting 'lock_timeout_s': must be a finite number"),
        ({"cache_ttl_s": float("inf")}, "setting 'cache_ttl_s': must be a finite number"),
        (
            {"lock_timeout": 5},
            r"setting 'lock_timeout': there is no such setting; did you mean lock_timeout_s\?",
        ),
        ({"colour": "red", "lease_ttl_s": -1}, "setting 'colour': "),
        ({"min_gpus": 9, "max_gpus": 8}, r"min_gpus \(9\) is above max_gpus \(8\)"),
        ({"policy": "magic"}, "unknown policy 'magic'"),
    ],
)
def test_a_wrong_argument_of_a_manager_is_named_in_one_line(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ResourceManagerError, match=f"^{named}") as caught:
        GPUResourceManager.from_url("memory://", **wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_airflows_configuration_is_read_in_its_processes_after_the_environment(tmp_path: Path) -> None:
    sections = (
        {"store": "redis://r:1/0", "lock_timeout_s": "60", "cache_ttl_s": "2"},
        {"cache_ttl_s": "-1"},
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
        "        print(found.store, found.cache_ttl_s, found.lock_timeout_s)\n"
        "    except Exception as error:\n"
        "        print(error)\n"
        "    for name in names:\n"
        "        del os.environ[name]"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    given = {"PATH": os.environ["PATH"], "AIRFLOW_HOME": str(tmp_path), "GPU_MANAGER_LOCK_TIMEOUT_S": "7"}
    said = subprocess.run(command, env=given, check=True, capture_output=True, text=True).stdout.splitlines()
    assert said[0] == "redis://r:1/0 2.0 7.0"
    assert said[1].startswith("[gpu_manager] cache_ttl_s of airflow.cfg: ")
    assert said[2].startswith("[gpu_manager] stroe of airflow.cfg: ")
    assert len(said) == 3
