"""Who calls, whether the service is well, and what it offers."""

from __future__ import annotations

from typing import Any

import flask

from resource_manager import STORED_FORMAT, __version__
from resource_manager.errors import StateClosedError
from resource_manager.rest.answers import CallerAnswer, Health
from resource_manager.rest.api.operations import routes
from resource_manager.rest.auth import Identity
from resource_manager.rest.openapi import document
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role


@routes.add("GET", "/api/caller", Role.READER)
def who(service: Service, caller: Identity) -> CallerAnswer:
    """Name, role and teams of the caller."""
    return {"name": caller.name, "role": str(caller.role), "teams": list(caller.teams)}


@routes.add("GET", "/livez", None)
def livez(service: Service, caller: Identity | None) -> Health:
    """Check that the service runs; its store is not asked."""
    return {"status": "ok", "version": __version__, "format": STORED_FORMAT}


@routes.add("GET", "/readyz", None)
def readyz(service: Service, caller: Identity | None) -> Health:
    """Check that the service reaches its store and may change it."""
    service.watch.check()
    store = service.manager.store
    if store.closed:
        raise StateClosedError("the store", store.closed)
    return livez(service, caller)


@routes.add("GET", "/healthz", None)
def healthz(service: Service, caller: Identity | None) -> Health:
    """The same as /readyz."""
    return readyz(service, caller)


@routes.add("GET", "/metrics", Role.READER)
def metrics(service: Service, caller: Identity) -> Any:
    """Prometheus metrics."""
    return flask.Response(service.metrics.text(), content_type="text/plain; version=0.0.4; charset=utf-8")


@routes.add("GET", "/openapi.json", Role.READER)
def openapi(service: Service, caller: Identity) -> Any:
    """This interface as an OpenAPI 3.1 document."""
    return document(tuple(routes.all), service.manager.gpu_range(), flask.request.script_root)
