"""`gpu-manager`: the manager's commands, on a service or directly on the store."""

from resource_manager.cli import (  # noqa: F401 - they add their commands
    agent,
    agents,
    by_hand,
    cluster,
    converting,
    discovering,
    install_files,
    job_commands,
    login,
    maintenance,
    reconciling,
    reporting,
    serving,
    storing,
    teams,
    token_commands,
    top,
    verifying,
)
from resource_manager.cli.bench import command  # noqa: F401
from resource_manager.cli.commands import main
from resource_manager.cli.doctor import command as _doctor  # noqa: F401

__all__ = ["main"]
