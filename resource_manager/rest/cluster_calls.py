"""Calls of a lease service about its cluster: servers and their agents, teams, windows, the history."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from resource_manager.errors import UnknownNodeError
from resource_manager.manager.agent_jobs import AgentState
from resource_manager.manager.cluster_results import (
    ClusterDiff,
    ClusterView,
    ServerDetail,
    ServerSummary,
    TeamsView,
    WindowView,
)
from resource_manager.manager.results import EstimatesView, Recorded, SlurmJob, Summary
from resource_manager.rest import answers
from resource_manager.rest.connection import PAGE, ServiceConnection

if TYPE_CHECKING:
    from resource_manager.core.models import Gpu
    from resource_manager.manager.cluster_change import ApplyOptions
    from resource_manager.manager.cluster_file.sections import ClusterForm
    from resource_manager.manager.maintenance_windows import WindowForm
    from resource_manager.manager.report import Report
    from resource_manager.manager.use_results import ServerUse


class ClusterCalls:
    """Calls about the cluster, each one of the manager's `Administration` or `Queries`."""

    _http: ServiceConnection

    def drain(
        self, server: int | str, gpu: int | str | None = None, *, reason: str = "", failed: bool = False
    ) -> ServerSummary:
        body = {"gpu": gpu, "reason": reason, "failed": failed}
        return self._http.post(ServerSummary, self._path(server, "/drain"), body)

    def resume(self, server: int | str, gpu: int | str | None = None) -> ServerSummary:
        return self._http.post(ServerSummary, self._path(server, "/resume"), {"gpu": gpu})

    def searched(self, server: int | str, jobs: Sequence[str], *, age_s: float = 0.0) -> ServerSummary:
        return self._http.post(
            ServerSummary, self._path(server, "/searched"), {"jobs": list(jobs), "age_s": age_s}
        )

    def server(self, server: int | str) -> ServerDetail:
        return self._http.get(ServerDetail, self._path(server))

    def adopt(self, server: int | str, gpus: Sequence[Gpu]) -> ServerDetail:
        listed = [
            {
                "gpu_id": gpu.gpu_id,
                "uuid": gpu.uuid,
                "type": gpu.gpu_type,
                "vendor": gpu.vendor,
                "memory_mib": gpu.memory_mib,
            }
            for gpu in gpus
        ]
        return self._http.post(ServerDetail, self._path(server, "/adopt"), {"gpus": listed})

    def order_job(self, server: str, key: str, order: Mapping[str, Any]) -> str:
        """Tell the agent of a server what to do with the job of a lease there."""
        return self._http.post(
            answers.Ordered, "/api/jobs/order", {"server": server, "key": key, "order": order}
        )["n"]

    def agent_state(self, server: str) -> AgentState:
        """Return what the agent of a server last said of the jobs that this client may read."""
        return self._http.get(AgentState, "/api/jobs", {"server": server})

    def job_output(self, server: str, key: str, offset: int, *, lease_id: str = "") -> dict[str, Any]:
        """Return a part of a job's output, which its agent sends now.

        The output of a job that is over is found by the id of its lease.
        """
        query = {"server": server, "key": key, "offset": offset, "task_id": lease_id or None}
        part = self._http.get(dict[str, Any], "/api/jobs/output", query)
        return {**part, "text": b64decode(part["text"]).decode()}

    def gpus(self, servers: Sequence[str] = ()) -> list[ServerUse]:
        """Return the use of every GPU as last reported, by server: of these servers, by default of all."""
        from resource_manager.manager.use_results import ServerUse

        if servers:
            return self._http.get(answers.Page[ServerUse], "/api/gpus", {"servers": list(servers)})["items"]
        return list(self._http.pages(ServerUse, "/api/gpus"))

    def reset(self) -> None:
        self._http.post(answers.Done, "/api/reset", {"confirm": True})

    def teams(self) -> TeamsView:
        return self._http.get(TeamsView, "/api/teams")

    def cluster(self) -> ClusterView:
        return self._http.get(ClusterView, "/api/cluster")

    def diff(self, definition: ClusterForm, options: ApplyOptions | None = None) -> ClusterDiff:
        return self._put_cluster(definition, options, dry_run=True)

    def apply(
        self, definition: ClusterForm, options: ApplyOptions | None = None, *, revision: str | None = None
    ) -> ClusterDiff:
        return self._put_cluster(definition, options, revision=revision)

    def _put_cluster(self, form: ClusterForm, options: ApplyOptions | None, **more: Any) -> ClusterDiff:
        sections = form.model_dump(mode="json", by_alias=True, exclude_unset=True)
        body = {"sections": sections, **({} if options is None else asdict(options)), **more}
        return self._http.call(ClusterDiff, "PUT", "/api/cluster", json=body)

    def maintenance(self) -> list[WindowView]:
        return self._http.get(answers.MaintenanceAnswer, "/api/maintenance")["windows"]

    def add_maintenance(self, form: WindowForm, *, dry_run: bool = False) -> WindowView:
        body = {**form.model_dump(mode="json", by_alias=True), "dry_run": dry_run}
        return self._http.post(WindowView, "/api/maintenance", body)

    def remove_maintenance(self, window_id: int, *, dry_run: bool = False) -> WindowView | None:
        body = {"id": window_id, "dry_run": dry_run}
        return self._http.post(answers.MaintenanceRemoveAnswer, "/api/maintenance/remove", body)["window"]

    def summary(self) -> Summary:
        return self._http.get(Summary, "/api/status")

    def servers(self) -> list[ServerSummary]:
        return self.summary()["servers"]

    def slurm_jobs(self) -> list[SlurmJob]:
        return self._http.get(answers.Page[SlurmJob], "/api/slurm")["items"]

    def keep_slurm_jobs(self, cluster: str, jobs: Sequence[SlurmJob]) -> None:
        self._http.post(answers.Done, "/api/slurm", {"cluster": cluster, "jobs": list(jobs)})

    def history(self, after: int = 0, limit: int = PAGE, *, by: str = "", what: str = "") -> list[Recorded]:
        """Return the changes after a version, those of `by` and `what` only; see `GPUResourceManager`."""
        wanted = {"by": by, "what": what}
        asked = {name: text for name, text in wanted.items() if text}
        size = PAGE if asked else min(limit, PAGE)
        found = islice(self._http.pages(answers.Change, "/api/history", after, size, **asked), limit)
        return cast("list[Recorded]", list(found))

    def report(self, by: Sequence[str] = ("team",), since: float | str = "30d") -> Report:
        """Return the GPU-hours of the last time, in seconds or as `30d`, by these keys."""
        from resource_manager.manager.report import Report  # with the accounting

        ago = since if isinstance(since, str) else f"{since:f}s"
        return self._http.get(Report, "/api/report", {"by": ",".join(by), "since": ago})

    def estimates(self) -> EstimatesView:
        """Return how often the estimated starts of pending requests came true."""
        return self._http.get(EstimatesView, "/api/estimates")

    def snapshot(self) -> dict[str, Any]:
        return self._http.get(answers.SnapshotAnswer, "/api/snapshot")["snapshot"]

    def _path(self, server: int | str, action: str = "") -> str:
        if isinstance(server, int) and server >= 0:
            return f"/api/servers/{server}{action}"
        ids = {row["server_name"]: row["server_id"] for row in self.servers()}
        by_name_or_number = {str(number): number for number in ids.values()} | ids
        if (number := by_name_or_number.get(str(server))) is None:
            raise UnknownNodeError(server, ids)
        return f"/api/servers/{number}{action}"
