"""`gpu-manager`: the manager's commands, on a service or directly on the store."""

from resource_manager.cli import (  # noqa: F401 - they add their commands
    agent_command,
    agents,
    by_hand,
    cluster_commands,
    converting,
    discovering,
    history_command,
    install_files,
    job_commands,
    lease_commands,
    login,
    maintenance_commands,
    reconciling,
    reporting,
    server_commands,
    serving,
    storing,
    token_commands,
    top,
    verifying,
)
from resource_manager.cli.bench import bench_command  # noqa: F401
from resource_manager.cli.doctor import doctor_command as _doctor  # noqa: F401
from resource_manager.cli.program import main

__all__ = ["main"]
