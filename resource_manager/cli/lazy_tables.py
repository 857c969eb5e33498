"""Tables of the commands, which load rich at their first use: no command with `--json` needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resource_manager.lazy import lazy_module

if TYPE_CHECKING:
    from resource_manager.cli import cluster_tables, tables
else:
    cluster_tables = lazy_module("resource_manager.cli.cluster_tables")
    tables = lazy_module("resource_manager.cli.tables")

__all__ = ["cluster_tables", "tables"]
