"""Settings from environment and file; a wrong one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

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
        "fifo",
    )


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"GPU_MANAGER_LEASE_TTL_S": "soon"}, "GPU_MANAGER_LEASE_TTL_S"),
        ({"GPU_MANAGER_LEASE_TTL_S": "-1"}, "GPU_MANAGER_LEASE_TTL_S"),
        ({"GPU_MANAGER_MIN_GPUS": "9"}, "min_gpus"),
        ({"GPU_MANAGER_SETTINGS": "/no/such/file.toml"}, "GPU_MANAGER_SETTINGS"),
    ],
)
def test_a_wrong_setting_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        Settings.load(environ)


def test_an_unknown_key_in_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("polciy = 'best_fit'\n")
    with pytest.raises(SettingsError, match="polciy"):
        Settings.load({"GPU_MANAGER_SETTINGS": str(path)})
