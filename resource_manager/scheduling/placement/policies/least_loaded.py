"""Least loaded: the node with the fewest leases."""

from __future__ import annotations

from resource_manager.scheduling.placement.policies.measured import Measured

least_loaded = Measured(lambda node, request: len(node.leases))
"""Place on the node that fits with the fewest leases, the first on ties (original design, section 3.3.2)."""
