"""Errors of the serverless simulator, one for each kind of misuse."""

from __future__ import annotations

from simulator.errors import InputError, SimulationError


class WorkflowError(InputError):
    """An invalid workflow: a cycle, an unknown function or unit, a number out of range."""


class ActionError(SimulationError, ValueError):
    """A decision that names no existing NUMA node, or an impossible amount of memory."""


class MemoryAllocationError(ActionError):
    """More memory than the NUMA node has, or than every node has."""


class EpisodeOverError(SimulationError):
    """A step after the last function was decided, or before the first reset."""
