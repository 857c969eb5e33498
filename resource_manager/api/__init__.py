"""The HTTP face of the manager: one Flask blueprint, its console, and who may call what."""

from __future__ import annotations

from resource_manager.api.app import create_app

__all__ = ["create_app"]
