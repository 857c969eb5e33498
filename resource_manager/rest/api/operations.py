"""The operations of the REST interface, to which each module of this folder adds its own."""

from __future__ import annotations

from resource_manager.rest.routing import Routes

routes = Routes()
