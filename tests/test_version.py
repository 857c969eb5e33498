"""Versions: one number, wherever somebody looks for it, and the number of the stored format beside it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from click.testing import CliRunner

from resource_manager import STORED_FORMAT, Settings, __version__
from resource_manager.airflow.provider_info import get_provider_info
from resource_manager.cli.program import main
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import persistence_of, standalone
from simulator.cli import main as simulate


def test_the_package_has_the_number_of_the_code() -> None:
    assert version("gpu-resource-manager") == __version__
    assert get_provider_info()["versions"] == [__version__]


def test_the_commands_print_it() -> None:
    asked = [CliRunner().invoke(command, ["--version"]).output for command in (main, simulate)]
    assert asked == [
        f"gpu-manager {__version__}, stored format {STORED_FORMAT}\n",
        f"gpu-simulate {__version__}\n",
    ]


def test_a_service_tells_it_in_health_metrics_and_interface(tmp_path: Path) -> None:
    with GPUResourceManager.from_url("memory://") as manager:
        kept = persistence_of(Settings(store="memory://"), tmp_path / "tokens.json")
        service = standalone(manager, kept, open_to="loopback")
        client = create_app(service).test_client()
        health, metrics, interface = (client.get(path) for path in ("/healthz", "/metrics", "/openapi.json"))
        service.watch.close()
    assert health.get_json() == {"status": "ok", "version": __version__, "format": STORED_FORMAT}
    labels = f'{{format="{STORED_FORMAT}",version="{__version__}"}}'
    assert f"gpu_manager_build_info{labels} 1.0" in metrics.text
    assert interface.get_json()["info"]["version"] == __version__
