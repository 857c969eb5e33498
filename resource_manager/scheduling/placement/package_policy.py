"""Policies of other packages: what they return is checked before anything is decided on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint
from operator import index
from traceback import extract_tb
from typing import Any

from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import usable_gpus
from resource_manager.core.models import Placement, Request
from resource_manager.errors import PolicyError

MAX_SHOWN = 100


def load(point: EntryPoint) -> Any:
    """Return what the entry point names, which can be called; raises `PolicyError`."""
    try:
        value = point.load()
    except Exception as error:
        raise PolicyError(f"{_named(point)} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(value):
        raise PolicyError(f"{_named(point)} is {_shown(value)}, which cannot be called")
    return value


class PackagePolicy:
    """A policy of an entry point, which raises `PolicyError` for its faults.

    A grant that does not fit must not be stored: no process could read the state any more.
    """

    def __init__(self, point: EntryPoint, policy: Any) -> None:
        self._point, self._policy = point, policy

    def __call__(self, cluster: ClusterState, request: Request) -> Placement | None:
        found = self._answer(self._policy, cluster, request)
        if found is None:
            return None
        if not isinstance(found, Placement):
            raise self._fault(request, f"it returned {_shown(found)}, neither a Placement nor None")
        state = cluster.by_name.get(found.node)
        if state is None or not state.fits(request):
            raise self._fault(request, f"it chose server {_shown(found.node)}, where that does not fit")
        try:
            gpu_ids = tuple(map(index, found.gpu_ids))
        except TypeError:
            gpu_ids = ()
        free = {gpu_id: state.gpu_free.get(gpu_id, 0) for gpu_id in gpu_ids}
        if len(gpu_ids) != request.gpus or len(usable_gpus(state.node, request, free)) != request.gpus:
            chosen = f"it chose gpu_ids={_shown(found.gpu_ids)} of {found.node!r}"
            raise self._fault(request, f"{chosen}, which are not {request.gpus} that it can have")
        return Placement(found.node, gpu_ids)

    @property
    def scores(self) -> Callable[[ClusterState, Request], dict[str, int]]:
        """The scores of the policy, if it has any."""
        return partial(self._answer, self._policy.scores)

    @property
    def with_seed(self) -> Callable[[int], PackagePolicy]:
        """The policy with another seed, if it draws."""
        seeded = self._policy.with_seed
        return lambda seed: PackagePolicy(self._point, seeded(seed))

    def _answer(
        self, call: Callable[[ClusterState, Request], Any], cluster: ClusterState, request: Request
    ) -> Any:
        try:
            return call(cluster, request)
        except Exception as error:
            raise self._fault(request, _in_words(error)) from error

    def _fault(self, request: Request, what: str) -> PolicyError:
        return PolicyError(f"{_named(self._point)} fails for {_shown(request.lease_id)}: {what}")


def package_of(point: EntryPoint) -> str:
    """Return the name of the distribution that brings the entry point; empty if it is not known."""
    return "" if point.dist is None else point.dist.name


def _named(point: EntryPoint) -> str:
    return f"policy {point.name!r} of {package_of(point) or point.value}"


def _in_words(error: Exception) -> str:
    """Return the error on one line, with its place."""
    last = extract_tb(error.__traceback__)[-1]
    place = "" if last.filename == __file__ else f" ({last.filename.rpartition('/')[2]}:{last.lineno})"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_SHOWN]}{place}"


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
