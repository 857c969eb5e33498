"""Services of this process, with and without a port, that leave no thread and no connection."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from resource_manager import GPUResourceManager, Settings
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import persistence_of, standalone
from resource_manager.rest.client import ServiceClient
from resource_manager.rest.http_server import bounded_server


@contextmanager
def listening(server: Any) -> Iterator[None]:
    """Run a `bounded_server` in a thread; at the end close every connection, held ones included."""

    def close() -> None:  # in the thread of all connections: none is accepted meanwhile
        for channel in list(server.active_channels.values()):
            channel.handle_close()
        server.close()

    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield
    finally:
        server.task_dispatcher.shutdown()
        with suppress(OSError):  # what woke the loop before may have it close the trigger's pipe already
            server.trigger.pull_trigger(close)
        thread.join()


@contextmanager
def served(manager: GPUResourceManager, folder: Path, threads: int, **bounds: Any) -> Iterator[str]:
    """Yield the URL of a service of the manager that listens on a port of this machine."""
    with serving(manager, folder, threads, **bounds) as server:
        yield f"http://127.0.0.1:{server.effective_port}"


@contextmanager
def serving(manager: GPUResourceManager, folder: Path, threads: int, **bounds: Any) -> Iterator[Any]:
    """Yield the server of a service of the manager; `bounds` are those of its connections."""
    kept = persistence_of(Settings(store="memory://"), folder / "tokens.json")
    service = standalone(manager, kept, open_to="loopback", threads=threads)
    server = bounded_server(create_app(service), "127.0.0.1", 0, threads=threads, **bounds)
    try:
        with listening(server):
            yield server
    finally:
        service.watch.close()


@contextmanager
def client_of(manager: GPUResourceManager, folder: Path) -> Iterator[ServiceClient]:
    """Yield a client of a service of the manager in this process, which anybody may use."""
    kept = persistence_of(Settings(store="memory://"), folder / "tokens.json")
    service = standalone(manager, kept, open_to="loopback")
    client = ServiceClient("http://localhost", transport=httpx.WSGITransport(create_app(service)))
    try:
        yield client
    finally:
        client.close()
        service.watch.close()
