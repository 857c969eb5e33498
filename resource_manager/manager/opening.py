"""The cluster given to a manager: it becomes that of an empty store; a store that has one keeps it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.models import Node
from resource_manager.core.names import listed
from resource_manager.errors import CorruptStateError, SettingsError, StateLostError
from resource_manager.manager.cluster_change import NO_OPTIONS, plan
from resource_manager.manager.cluster_file.sections import ClusterDefinition, settings_of
from resource_manager.manager.commit.protocol import Transactions
from resource_manager.scheduling.placement.policies import get_policy, package_of
from resource_manager.scheduling.queue.orders import get_order

logger = logging.getLogger(__name__)

HOW_TO_CHANGE = "gpu-manager apply changes it"


@dataclass(frozen=True, slots=True)
class StatedCluster:
    """Cluster given to a manager: `nodes` (None: not given) and fields of `ClusterSettings`.

    `built_in` are the servers for an empty store where none are given.
    """

    nodes: tuple[Node, ...] | None
    fields: Mapping[str, Any]
    built_in: tuple[Node, ...] = ()

    def snapshot(self) -> Snapshot:
        """Return the state that an empty store gets."""
        nodes = self.built_in if self.nodes is None else self.nodes
        settings = settings_of(self.fields)
        named = replace(settings, policy_package=package_of(settings.policy))
        return replace(ClusterState(nodes).snapshot(), settings=named)


def open_cluster(commits: Transactions, stated: StatedCluster) -> None:
    """Give an empty store the cluster given to the manager; write nothing to another one.

    Raises `SettingsError` if the store has another cluster than the one given.
    """
    snapshot = stated.snapshot()
    # raise for an unknown name, also where nothing is stated
    get_policy(snapshot.settings.policy)
    get_order(snapshot.settings.order)
    if not (stated.fields or stated.nodes is not None or stated.built_in):
        return
    try:
        is_first = commits.initialise(snapshot)
    except (CorruptStateError, StateLostError) as error:
        # Every operation will raise the same error; only a reset helps, and that needs a manager.
        logger.error("%s", error)
        return
    if not is_first:
        commits.peek_replica(lambda cluster, now: _require_same(cluster, stated, snapshot.settings, now))


def _require_same(
    cluster: ClusterState, stated: StatedCluster, settings: ClusterSettings, now: float
) -> None:
    for name in stated.fields:
        given, stored = getattr(settings, name), getattr(cluster.settings, name)
        if given != stored:
            raise SettingsError(f"{name} is {stored!r} in the store, not {given!r}: {HOW_TO_CHANGE}")
    found = plan(cluster, ClusterDefinition(nodes=stated.nodes), NO_OPTIONS, now).lines
    if found:
        raise SettingsError(f"the store has another inventory ({listed(found, 1)}): {HOW_TO_CHANGE}")
