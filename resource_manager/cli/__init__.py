"""`gpu-manager`: the manager's commands, against a service or straight against the store."""

from __future__ import annotations

import sys

try:
    import click  # noqa: F401
    import rich  # noqa: F401
except ModuleNotFoundError:  # pragma: no cover - the message is the whole behaviour
    sys.exit("gpu-manager needs the extra: pip install 'gpu-resource-manager[api]'")

from resource_manager.cli import benching, reconciling, serving  # noqa: F401 - they add their commands
from resource_manager.cli.commands import main

__all__ = ["main"]
