"""`gpu-manager`: the manager's commands, on a service or directly on the store."""

from resource_manager.cli import benching, reconciling, serving  # noqa: F401 - importing them adds their commands
from resource_manager.cli.commands import main

__all__ = ["main"]
