"""The change from a stored cluster to what its file defines: the difference in lines, and its commit."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from resource_manager.core.changes import Change, ClusterSettingsChanged, TeamsChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import ClusterSettings, Notice
from resource_manager.core.inventory import Adoption
from resource_manager.core.maintenance import Window, as_text
from resource_manager.core.models import Gpu, Node
from resource_manager.core.node_state import NodeState
from resource_manager.core.search import newcomer
from resource_manager.core.teams import Teams
from resource_manager.errors import InvalidRequestError, PolicyError
from resource_manager.manager import maintenance_windows, team_views
from resource_manager.manager.cluster_file.notice_tables import in_words
from resource_manager.manager.cluster_file.sections import DEFAULTS, KEYS, ClusterDefinition
from resource_manager.manager.cluster_file.sign_on import difference
from resource_manager.manager.cluster_file.writing import sections_of, to_toml
from resource_manager.manager.cluster_results import ClusterDiff, ClusterView
from resource_manager.manager.plurals import counted
from resource_manager.manager.server_gpus import replacement
from resource_manager.manager.wording import (
    bounded,
    changed_in_words,
    entries_changed,
    gpus_in_words,
    value_in_words,
)
from resource_manager.scheduling.placement.policies import get_policy, package_of
from resource_manager.scheduling.queue.orders import get_order

REMOVABLE = ("cluster", "teams", "maintenance", "health", "sign_on", "notices")
"""Sections that `remove` ends; servers leave one by one."""


@dataclass(frozen=True, slots=True)
class ApplyOptions:
    """Consent to what a difference alone does not do.

    `remove` names sections to end, `retire` servers that leave although they have leases; with `force` the
    file's word counts against an adoption.
    """

    remove: tuple[str, ...] = ()
    retire: tuple[str, ...] = ()
    force: bool = False


NO_OPTIONS = ApplyOptions()


def revision_of(cluster: ClusterState) -> str:
    """Return a short text that another definition of the cluster does not have."""
    adopted = sorted(cluster.adoptions)
    return hashlib.sha256(f"{to_toml(sections_of(cluster))}{adopted}".encode()).hexdigest()[:16]


def cluster_view(cluster: ClusterState) -> ClusterView:
    """Return the stored cluster as its file has it."""
    sections = sections_of(cluster)
    return {"revision": revision_of(cluster), "sections": sections, "toml": to_toml(sections)}


def plan(cluster: ClusterState, definition: ClusterDefinition, options: ApplyOptions, now: float) -> Plan:
    """Return the way from the stored cluster to what is defined; raises `InvalidRequestError`."""
    for section in options.remove:
        if section not in REMOVABLE:
            raise InvalidRequestError("{remove}: {!r} is not one of {}", section, ", ".join(REMOVABLE))
    for name in options.retire:
        if name not in cluster.by_name:
            raise InvalidRequestError("{retire}: there is no server {!r}", name)
    remove = options.remove
    definition = replace(
        definition,
        settings=DEFAULTS if "cluster" in remove else definition.settings,
        health=() if "health" in remove else definition.health,
        teams=Teams() if "teams" in remove else definition.teams,
        windows=() if "maintenance" in remove else definition.windows,
        notices=() if "notices" in remove else definition.notices,
    )
    return Plan(cluster, definition, options, now)


class Plan:
    """Lines of a difference, the changes that make it, and the reasons why it is refused."""

    def __init__(
        self, cluster: ClusterState, definition: ClusterDefinition, options: ApplyOptions, now: float
    ) -> None:
        self._cluster = cluster
        self._defined = definition
        self._options = options
        self._now = now
        self.revision = revision_of(cluster)
        self.lines: list[str] = []
        self.changes: list[Change] = []
        self.refusals: list[InvalidRequestError] = []
        self._settings()
        nodes = self._nodes()
        self._teams(nodes)
        self._windows(nodes)

    def view(self) -> ClusterDiff:
        return {
            "changed": bool(self.lines),
            "lines": self.lines,
            "refused": [str(error) for error in self.refusals],
            "revision": self.revision,
        }

    def _say(self, sign: str, text: str) -> None:
        self.lines.append(f"{sign} {text}")

    def _refuse(self, sign: str, what: str, why: str, field: str) -> None:
        self._say(sign, f"{what}: refused, {why}")
        self.refusals.append(InvalidRequestError("{}: {}", what, why, field=field))

    # ---- [cluster], [health], [sign_on] and [[notices]] ----

    def _settings(self) -> None:
        before = self._cluster.settings
        after = before if self._defined.settings is None else self._checked(self._defined.settings)
        health = before.health if self._defined.health is None else self._defined.health
        sign_on = before.sign_on if self._defined.sign_on is None else self._defined.sign_on
        sign_on = None if "sign_on" in self._options.remove else sign_on
        notices = before.notices if self._defined.notices is None else self._notices(before.notices)
        after = replace(after, health=health, sign_on=sign_on, notices=notices)
        for key, name in KEYS.items():
            old, new = getattr(before, name), getattr(after, name)
            if old != new:
                self.lines.append(changed_in_words(key, old, new))
        rules = ({rule.condition: rule for rule in each} for each in (before.health, health))
        for sign, condition, changed in entries_changed(*rules):
            self._say(sign, f"health {condition}: {' → '.join(rule.action for rule in changed)}")
        self.lines += difference(before.sign_on, sign_on)
        for sign, of, others in (("-", before.notices, notices), ("+", notices, before.notices)):
            for notice in of:
                if notice not in others:
                    self._say(sign, in_words(notice))
        if after != before:
            self.changes.append(ClusterSettingsChanged(after, self._now, bounded(self.lines)))

    def _notices(self, stored: Sequence[Notice]) -> tuple[Notice, ...]:
        """Return the defined notices; an address that is stated masked, as it is shown, is the stored one."""
        known = {notice.masked.to: notice.to for notice in stored}
        found = []
        for number, notice in enumerate(self._defined.notices or ()):
            if notice.is_masked and notice.to not in known:
                why = f"{notice.to} stands for an address that is not stored: state the address itself"
                self._refuse("+", in_words(notice), why, f"notices.{number}.to")
            found.append(replace(notice, to=known.get(notice.to, notice.to)))
        return tuple(found)

    def _checked(self, settings: ClusterSettings) -> ClusterSettings:
        """Return the settings with the package of the policy, which must be installed here."""
        for key, look_up in (("policy", get_policy), ("order", get_order)):
            name = getattr(settings, key)
            try:
                look_up(name)
            except PolicyError as error:
                self._refuse("~", f"{key} {name}", str(error), f"cluster.{key}")
                return settings
        return replace(settings, policy_package=package_of(settings.policy))

    # ---- [[servers]] ----

    def _nodes(self) -> tuple[Node, ...]:
        present = {state.name: state for state in self._cluster.nodes if not state.retired}
        stored = tuple(state.node for state in present.values())
        if self._defined.nodes is None:
            return stored
        nodes = tuple(self._with_known(number, node) for number, node in enumerate(self._defined.nodes))
        names, said = {node.name for node in nodes}, len(self.lines)
        for name, state in present.items():
            if name not in names:
                self._leaves(state)
        for node in nodes:
            if node.name not in present:
                is_new = newcomer(node.name, self._now, self._cluster.absent_drained) is None
                closed = "" if is_new else ", closed until searched for jobs that the restored state lacks"
                self._say("+", f"server {node.name}, {gpus_in_words(node.gpus)}{closed}")
            else:
                self._changed_server(present[node.name].node, node)
        stayed = [node.name for node in nodes if node.name in present]
        if stayed != [node.name for node in stored if node.name in names]:
            self._say("~", "the order of the servers")
        self._refuse_leased_twice(nodes)
        if nodes != stored:
            self.changes += replacement(self._cluster, nodes, self._now, self.lines[said:])
        return nodes

    def _refuse_leased_twice(self, nodes: Sequence[Node]) -> None:
        """Refuse servers with GPUs that leases hold under another name, as of one that gets a new name."""
        after = {node.name: node.address for node in nodes}
        before = {state.name: state.node.address for state in self._cluster.nodes}
        held: dict[str, NodeState] = {}
        """The servers with leases by UUIDs of the GPUs, and by addresses that they lose."""
        for state in self._cluster.nodes:
            for lease in state.leases.values():
                for member in lease.on(state.name):
                    known = (state.gpu_uuids.get(gpu_id, "") for gpu_id in member.gpu_ids)
                    held |= dict.fromkeys((*member.gpu_uuids, *known), state)
            if state.leases and after.get(state.name) != state.node.address:
                held[state.node.address] = state
        held.pop("", None)
        for number, node in enumerate(nodes):
            address = [node.address] if before.get(node.name) != node.address else []
            keys = (*address, *(gpu.uuid for gpu in node.gpus))
            other = next((held[key] for key in keys if key in held and held[key].name != node.name), None)
            if other is not None:
                leases = counted(len(other.leases), "lease")
                why = f"it has GPUs of {other.name}, on which {leases} must end before"
                self._refuse("~", f"server {node.name}", why, f"servers.{number}")

    def _with_known(self, number: int, node: Node) -> Node:
        """Return the node with what is known of its GPUs and its file does not say."""
        adoption = self._cluster.adoptions.get(node.name)
        if adoption is not None and not self._options.force:
            if _contradicts(node.gpus, adoption.gpus):
                self._refuse("~", f"server {node.name}", _adopted(node, adoption), f"servers.{number}")
            return replace(node, gpus=adoption.gpus)
        state = self._cluster.by_name.get(node.name)
        known = {} if state is None else {gpu.gpu_id: gpu for gpu in state.node.gpus}
        return replace(node, gpus=tuple(_identified(gpu, known.get(gpu.gpu_id)) for gpu in node.gpus))

    def _leaves(self, state: NodeState) -> None:
        many = len(state.leases)
        if not many or state.name in self._options.retire:
            until = f", once {counted(many, 'lease')} ended" if many else ""
            self._say("-", f"server {state.name}{until}")
            return
        why = f"it has {counted(many, 'lease')} (--retire {state.name})"
        self._refuse("-", f"server {state.name}", why, "servers")

    def _changed_server(self, old: Node, new: Node) -> None:
        if old == new:
            return
        parts = [
            f"{name} {value_in_words(old.resources.get(name))} → {value_in_words(new.resources.get(name))}"
            for name in sorted({*old.resources, *new.resources})
            if old.resources.get(name) != new.resources.get(name)
        ]
        parts += [
            f"{name} {value_in_words(getattr(old, key))} → {value_in_words(getattr(new, key))}"
            for name, key in _SERVER_KEYS.items()
            if getattr(old, key) != getattr(new, key)
        ]
        if old.gpus != new.gpus:
            before, after = gpus_in_words(old.gpus), gpus_in_words(new.gpus)
            parts.append(f"{before} → {after}" if before != after else f"{after} with other ids or UUIDs")
        self._say("~", f"server {new.name}: {'; '.join(parts)}")

    # ---- teams ----

    def _teams(self, nodes: Sequence[Node]) -> None:
        before = self._cluster.teams
        after = before if self._defined.teams is None else self._defined.teams
        if self._defined.teams is not None or self._defined.nodes is not None:
            capacity = Counter(gpu.gpu_type for node in nodes for gpu in node.gpus)
            try:
                team_views.check(self._cluster, after, capacity)
            except InvalidRequestError as error:
                if self._defined.teams is None:
                    error.field = "servers"
                self.refusals.append(error)
                self._say("~", f"{error}: refused")
        lines = list(team_views.difference(before, after))
        self.lines += lines
        if after != before:
            self.changes.append(TeamsChanged(after, self._now, bounded(lines)))

    # ---- [[maintenance]] ----

    def _windows(self, nodes: Sequence[Node]) -> None:
        if self._defined.windows is None:
            named = [name for window in self._cluster.windows if window.in_file for name in window.servers]
            for name in sorted({*named} - {node.name for node in nodes}):
                self._refuse("-", f"server {name}", "a window of [[maintenance]] names it", "servers")
            return
        others = [window for window in self._cluster.windows if not window.in_file]
        left = [window for window in self._cluster.windows if window.in_file]
        kept: list[Window] = []
        new: list[Window] = []
        defined = ClusterState(nodes)
        for number, asked in enumerate(self._defined.windows):
            try:
                wanted = maintenance_windows.window_of(defined, asked, self._now)
            except InvalidRequestError as error:
                error.field = f"maintenance.{number}.{error.field}"
                raise
            wanted = replace(wanted, begin=float(int(wanted.begin)), end=float(int(wanted.end)), in_file=True)
            known = maintenance_windows.same_as(left, wanted)
            if known is not None:
                left.remove(known)
                kept.append(known)
            elif maintenance_windows.same_as((*kept, *new), wanted) is None:
                new.append(replace(wanted, window_id=self._cluster.version + 1 + len(new)))
                self._say("+", _window(wanted))
        for window in left:
            self._say("-", _window(window))
        # One change for each new window: its number is never given again.
        for count in range(1, len(new) + 1):
            found = maintenance_windows.replaced(self._cluster, [*others, *kept, *new[:count]], self._now)
            self.changes.append(found if count == len(new) else replace(found, lines=()))
        if left and not new:
            found = maintenance_windows.replaced(self._cluster, [*others, *kept], self._now)
            self.changes.append(found)


_SERVER_KEYS = {"id": "server_id"} | {
    each.name: each.name
    for each in fields(Node)
    if each.name not in ("name", "server_id", "resources", "gpus")
}
"""Key of `[[servers]]` -> field of `Node`, for those that are compared as they are."""


def _identified(gpu: Gpu, known: Gpu | None) -> Gpu:
    """Return the GPU with the known UUID if it states none and is of the same kind."""
    if gpu.uuid or known is None or replace(known, uuid="") != gpu:
        return gpu
    return known


def _contradicts(gpus: Sequence[Gpu], adopted: Sequence[Gpu]) -> bool:
    """Return True if a file's GPUs cannot be those that were adopted, in what it says of them."""
    if [gpu.gpu_id for gpu in gpus] != [gpu.gpu_id for gpu in adopted]:
        return True
    return any(
        (said.uuid and said.uuid != known.uuid)
        or (said.gpu_type and said.gpu_type != known.gpu_type)
        or (said.memory_mib and said.memory_mib != known.memory_mib)
        for said, known in zip(gpus, adopted, strict=True)
    )


def _adopted(node: Node, adoption: Adoption) -> str:
    by = f" by {adoption.by}" if adoption.by else ""
    return (
        f"its {gpus_in_words(adoption.gpus)} were adopted at {as_text(adoption.at)}{by}, and the file says "
        f"{gpus_in_words(node.gpus)} with other ids or UUIDs (--force takes the file's)"
    )


def _window(window: Window) -> str:
    servers = ", ".join(window.servers)
    begin, end = as_text(window.begin), as_text(window.end)
    return f"maintenance of {servers} every week from {begin} until {end}"
