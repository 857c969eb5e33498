"""The console: pages for looking and acting."""

from __future__ import annotations

from resource_manager.api.routing import Routes

routes = Routes()
