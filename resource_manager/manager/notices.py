"""Notices for people about the cluster: what is wrong with it, and whether its file says something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from resource_manager.errors import ClusterFileError, ResourceManagerError
from resource_manager.manager.cluster_file.reading import ClusterFiles
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.manager.cluster_results import ClusterDiff
from resource_manager.manager.plurals import counted
from resource_manager.manager.results import Summary


def notices_of(summary: Summary, path: Path | None, diff: Callable[[ClusterForm], ClusterDiff]) -> list[str]:
    """Return what the summary says of a wrong configuration, and a notice if the file at `path` differs."""
    found = [wrong] if (wrong := summary.get("misconfigured")) else []
    if path is None:
        return found
    try:
        if lines := len(diff(ClusterFiles([path]).form)["lines"]):
            found.append(f"{path.name} differs ({counted(lines, 'line')}): gpu-manager diff")
    except ClusterFileError as error:
        found.append(str(error))
    except ResourceManagerError as error:  # it is refused, or a service does not let this caller compare
        found.append(f"{path.name} cannot be compared: {error}")
    return found
