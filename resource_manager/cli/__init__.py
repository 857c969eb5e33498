"""`gpu-manager`: the manager's commands, against a service or straight against the store."""

from resource_manager.cli import benching, reconciling, serving  # noqa: F401 - they add their commands
from resource_manager.cli.commands import main

__all__ = ["main"]
