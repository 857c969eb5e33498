"""Administration: servers, GPUs, maintenance windows, the cluster as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from resource_manager.core.changes import Change, Drained, Resumed
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.identifiers import check_text
from resource_manager.core.maintenance import Window
from resource_manager.core.models import Gpu
from resource_manager.core.refusal import misconfigured
from resource_manager.core.search import (
    OUTDATED,
    awaits_restore,
    closed_by_hand,
    closed_without_restore,
    is_searchable,
    outdated,
    searched,
    without_lease,
)
from resource_manager.errors import (
    ClusterChangedError,
    CorruptStateError,
    InvalidRequestError,
    StateLostError,
)
from resource_manager.manager import maintenance_windows, repeats, server_views
from resource_manager.manager.agent_jobs import of_no_lease
from resource_manager.manager.cluster_change import NO_OPTIONS, ApplyOptions, plan, revision_of
from resource_manager.manager.cluster_file.sections import ClusterDefinition, ClusterForm
from resource_manager.manager.cluster_results import ClusterDiff, ServerDetail, ServerSummary, WindowView
from resource_manager.manager.commit.asking import Step
from resource_manager.manager.commit.group import Reader
from resource_manager.manager.commit.protocol import Transactions
from resource_manager.manager.maintenance_windows import WindowForm
from resource_manager.manager.opening import StatedCluster
from resource_manager.manager.requests import gpu_number, server_name
from resource_manager.manager.results import SlurmJob
from resource_manager.manager.server_gpus import adoption
from resource_manager.manager.server_views import server_detail
from resource_manager.scheduling import allocator
from resource_manager.storage import Store
from resource_manager.storage.backup import in_utc
from resource_manager.storage.mark import Mark
from resource_manager.storage.once import Once

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Administration:
    """Changes of servers, windows and the cluster, each one commit of `Transactions`."""

    _commits: Transactions
    store: Store
    _stated: StatedCluster

    def keep_slurm_jobs(self, cluster: str, jobs: Sequence[SlurmJob]) -> None:
        """Replace what is known of the jobs of a cluster of Slurm, which `slurm_jobs` returns."""
        from resource_manager.manager import slurm_jobs  # on first use, as in queries: it builds a validator

        slurm_jobs.keep(self.store, cluster, jobs)

    def add_maintenance(
        self, form: WindowForm, *, dry_run: bool = False, once: Once | None = None
    ) -> WindowView:
        """Keep servers free in a window of time; return it, with `dry_run` without adding it.

        One that is there already, with all its words, is not added again.

        Raises `InvalidRequestError` for an unknown server, or a window that ends before it begins or is over.
        """

        if dry_run:
            return self._commits.read(
                lambda cluster, now: maintenance_windows.as_view(
                    cluster, maintenance_windows.window_of(cluster, form, now), now
                )
            )
        window: Window

        def step(cluster: ClusterState, now: float) -> list[Change]:
            nonlocal window
            window = maintenance_windows.window_of(cluster, form, now)
            if same := maintenance_windows.same_as(cluster.windows, window):
                window = same
                return []
            return [maintenance_windows.replaced(cluster, [*cluster.windows, window], now)]

        def added(cluster: ClusterState, now: float) -> WindowView:
            return maintenance_windows.as_view(cluster, window, now)

        return self._commits.run(step, added, once=repeats.of_window(once))

    def remove_maintenance(
        self, window_id: int, *, dry_run: bool = False, once: Once | None = None
    ) -> WindowView | None:
        """Remove a maintenance window, and grant the pending requests that now fit; return what it was.

        None if there is none of that number, as after a removal before.
        """

        def view(cluster: ClusterState, now: float) -> WindowView | None:
            return maintenance_windows.numbered(cluster, window_id, now)

        if dry_run:
            return self._commits.read(view)
        removed: WindowView | None = None

        def step(cluster: ClusterState, now: float) -> list[Change]:
            nonlocal removed
            removed = view(cluster, now)
            if removed is None:
                return []
            rest = [window for window in cluster.windows if window.window_id != window_id]
            return self._commits.with_dispatch(
                cluster, [maintenance_windows.replaced(cluster, rest, now)], now
            )

        def answer(cluster: ClusterState, now: float) -> WindowView | None:
            return removed

        return self._commits.run(step, answer, once=repeats.of_answer(once, answer))

    def drain(
        self,
        server: int | str,
        gpu: int | str | None = None,
        *,
        reason: str = "",
        failed: bool = False,
        once: Once | None = None,
    ) -> ServerSummary:
        """Drain the server, or one GPU of it by number or UUID: no new leases, its current ones stay.

        `failed` marks a server as broken. Raises `InvalidRequestError` for an unknown GPU.
        """
        check_text(reason=reason)
        if gpu is not None and failed:
            raise InvalidRequestError("{failed} is said of a whole server, not of one GPU")
        if gpu is None and awaits_restore(Drained("", 0.0, reason)):
            raise InvalidRequestError(
                "{reason} {!r} is what a restore says of a server: use other words", reason
            )

        def closed(cluster: ClusterState, name: str, now: float) -> list[Change]:
            if gpu is not None:
                return allocator.drain_gpu(cluster, name, gpu_number(cluster, name, gpu), now, reason)
            drained = Drained(name, now, reason, bool(failed))
            return [closed_by_hand(drained, cluster.node(name).drained)]

        return self._change(server, closed, once)

    def resume(
        self, server: int | str, gpu: int | str | None = None, *, once: Once | None = None
    ) -> ServerSummary:
        """Reopen a drained or silent server, or one closed GPU of it, and grant the pending that now fit.

        What ended leases held on the GPU is taken as clean. Raises `InvalidRequestError` for an unknown GPU.
        """

        def opened(cluster: ClusterState, name: str, now: float) -> list[Change]:
            if gpu is not None:
                return allocator.resume_gpu(cluster, name, gpu_number(cluster, name, gpu), now)
            return [Resumed(name, now)]

        return self._change(server, opened, once)

    def searched(
        self, server: int | str, jobs: Sequence[str], *, age_s: float = 0.0, once: Once | None = None
    ) -> ServerSummary:
        """Note the keys of all jobs that a launcher saw on a server without an agent, `age_s` ago.

        A server that waits for its search after a restore opens if each has its lease, else its reason names
        the others.
        """

        def step(cluster: ClusterState, name: str, now: float) -> list[Change]:
            state = cluster.node(name)
            drained = state.drained
            if drained is None or state.watched or not is_searchable(drained, cluster.settings, now - age_s):
                return []
            unknown = without_lease(state, of_no_lease(cluster, jobs))
            return list(searched(drained, unknown, now, is_complete=True))

        return self._change(server, step, once)

    def decide(self, step: Step, reader: Reader[T], *, max_age_s: float = 0.0) -> T:
        """Commit what `step` decides, and the grants that it allows; return the reader's answer right after.

        The step may be called several times, and must not change the state; the last call counts. That it
        changes nothing may be decided on a state of `max_age_s` ago.
        """

        def with_grants(cluster: ClusterState, now: float) -> list[Change]:
            return self._commits.with_dispatch(cluster, step(cluster, now), now)

        return self._commits.run(with_grants, reader, max_age_s=max_age_s)

    def commit(self, step: Step) -> list[Change]:
        """Commit what `step` decides on the newest state, and the grants that it allows; return all of it.

        The step may be called several times, and must not change the state.
        """
        made: list[Change] = []

        def with_grants(cluster: ClusterState, now: float) -> list[Change]:
            made[:] = self._commits.with_dispatch(cluster, step(cluster, now), now)
            return list(made)

        self._commits.run(with_grants, lambda cluster, now: None)
        return made

    def distrust(self, mark: Mark, seen_by: str = "") -> str:
        """Grant nothing, as the state lacks the change of that mark; close its servers for all. Return why.

        `seen_by` says who told that mark, if that is known. Ends with `trust`; the servers open with the
        state that `store restore` or a reset puts in its place.
        """
        newest = in_utc(mark.at)
        why = (
            f"the state in the store is {OUTDATED}{newest} (version {mark.version}) that "
            f"{seen_by or 'a service, its archive or an agent'} has seen: gpu-manager store restore FILE of "
            "the newest backup, or gpu-manager reset if no job runs"
        )
        self._commits.distrusted = misconfigured(why)

        def close(cluster: ClusterState, now: float) -> list[Change]:
            return [outdated(state.name, now, newest) for state in cluster.nodes if state.drained is None]

        if self._commits.peek_replica(lambda cluster, now: any(not state.retired for state in cluster.nodes)):
            self.commit(close)
        return why

    def trust(self) -> None:
        """Take back `distrust`."""
        self._commits.distrusted = None

    def adopt(self, server: int | str, gpus: Sequence[Gpu], *, once: Once | None = None) -> ServerDetail:
        """Give a server these GPUs in the inventory; no file takes them back unless it is forced.

        Raises `ServerInUseError` while it has leases.
        """
        name = self._commits.peek_replica(lambda cluster, now: server_name(cluster, server))

        def view(cluster: ClusterState, now: float) -> ServerDetail:
            return server_detail(cluster, name)

        answer = self._commits.run(
            lambda cluster, now: adoption(cluster, name, gpus, now),
            view,
            exclusive=True,
            once=repeats.of_answer(once, view),
        )
        self._commits.expire_and_schedule()
        return answer

    def apply(
        self,
        definition: ClusterDefinition | ClusterForm,
        options: ApplyOptions | None = None,
        *,
        revision: str | None = None,
        once: Once | None = None,
    ) -> ClusterDiff:
        """Make the cluster what is defined, in one commit, and return what that changed.

        Raises `InvalidRequestError`, changing nothing, if any of it is refused, and `ClusterChangedError` if
        the stored cluster has another revision than that of the difference which was shown.
        """
        defined = definition if isinstance(definition, ClusterDefinition) else definition.definition()
        made: list[ClusterDiff] = []

        def step(cluster: ClusterState, now: float) -> list[Change]:
            found = plan(cluster, defined, options or NO_OPTIONS, now)
            if revision is not None and revision != found.revision:
                raise ClusterChangedError(
                    "the cluster was changed since its difference was shown: look again"
                )
            if found.refusals:
                raise found.refusals[0]
            made[:] = [found.view()]
            return found.changes

        def answer(cluster: ClusterState, now: float) -> ClusterDiff:
            return {**made[0], "revision": revision_of(cluster)}

        done = self._commits.run(step, answer, exclusive=True, once=repeats.of_answer(once, answer))
        self._commits.expire_and_schedule()
        return done

    def reset(self, *, once: Once | None = None) -> None:
        """Drop all leases and the queue, keep the cluster and what is closed; raises `LockTimeoutError`.

        What waits for a restore opens. Dangerous while jobs run. Fencing tokens keep growing, so an old
        holder cannot pass as a new one.
        """
        self._commits.replace(self._emptied(), once)
        logger.warning("all resources were reset")

    def _change(
        self, server: int | str, decide: Callable[[ClusterState, str, float], list[Change]], once: Once | None
    ) -> ServerSummary:
        name = self._commits.peek_replica(lambda cluster, now: server_name(cluster, server))

        def step(cluster: ClusterState, now: float) -> list[Change]:
            return self._commits.with_dispatch(cluster, decide(cluster, name, now), now)

        def view(cluster: ClusterState, now: float) -> ServerSummary:
            return server_views.server(cluster.node(name))

        return self._commits.run(step, view, once=repeats.of_answer(once, view))

    def _emptied(self) -> Snapshot:
        """Return the stored cluster without leases and queue; what a new store gets if it cannot be read."""
        try:
            known = self._commits.read(lambda cluster, now: cluster.snapshot())
        except (CorruptStateError, StateLostError):
            known = self._stated.snapshot()
        nodes = [node for node in known.nodes if node.name not in known.retired]
        names = {node.name for node in nodes}
        return replace(
            ClusterState(nodes).snapshot(),
            settings=known.settings,
            teams=known.teams,
            windows=known.windows,
            adoptions=known.adoptions,
            drained=tuple(closed_without_restore(known.drained)),
            closed_gpus=known.closed_gpus,
            opened_gpus=tuple(each for each in known.opened_gpus if each.node in names),
            watched=tuple(name for name in known.watched if name in names),
            silent=tuple(lost for lost in known.silent if lost.node in names),
        )
