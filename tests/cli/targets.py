"""Commands run on a service and directly on a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from werkzeug.serving import make_server

from resource_manager import GPUResourceManager, Settings
from resource_manager.cli import main
from resource_manager.cli.target import Target
from resource_manager.fleet.opening import REPORTS
from resource_manager.manager.lease_service import LeaseService
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import persistence_of, standalone

Run = Callable[..., Result]


def holding(manager: LeaseService) -> Callable[[Mapping[str, Any]], Target]:
    """Return what makes the target of a command that runs on this manager, whatever its options name."""

    class Held(Target):
        @property
        def manager(self) -> LeaseService:
            return manager

    return Held.of


@contextmanager
def running_on(target: str, manager: GPUResourceManager, folder: Path) -> Iterator[Run]:
    """Yield a function that runs a command on the manager: through a "service", or as its "store"."""
    runner = CliRunner()
    if target == "store":
        manager.read_reports_by(REPORTS)
        yield lambda *arguments: runner.invoke(main, list(arguments), obj=holding(manager))
        return
    service = standalone(
        manager, persistence_of(Settings(store="memory://"), folder / "tokens.json"), open_to="loopback"
    )
    server = make_server("127.0.0.1", 0, create_app(service), threaded=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield lambda *arguments: runner.invoke(main, ["--url", f"http://127.0.0.1:{server.port}", *arguments])
    service.watch.close()
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)
