"""Errors of the serverless simulator, one for each kind of misuse."""

from __future__ import annotations

from simulator.errors import InputError, SimulationError


class WorkflowError(InputError):
    """A workflow that is no graph of functions: a cycle, an edge without an end, an impossible number."""


class UnitError(InputError):
    """A quantity with a unit that is not known."""


class ClusterConfigError(InputError):
    """A cluster that cannot be built, one without NUMA nodes for example."""


class ActionError(SimulationError, ValueError):
    """A decision that names no NUMA node, or no amount of memory that could be given."""


class MemoryAllocationError(ActionError):
    """More memory than the NUMA node has, or than every node has."""


class EpisodeOverError(SimulationError):
    """A step after the last function was decided, or before the first reset."""
