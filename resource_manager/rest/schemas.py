"""Bodies, queries and answers of the REST service; the OpenAPI document is generated from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

from resource_manager.core.announced import MAX_AFTER, MAX_ANNOUNCED
from resource_manager.core.changes import JobEnd
from resource_manager.core.models import MAX_RENEWAL_S, MAX_TIME_S
from resource_manager.manager.announcements import MAX_COPIES
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.manager.cluster_file.servers import MAX_GPUS_OF_SERVER, Uuid, Vendor
from resource_manager.manager.commit.asking import MAX_BY
from resource_manager.manager.demand import Demand, WhatIf, from_texts
from resource_manager.manager.demand_fields import LeaseId, Text
from resource_manager.manager.maintenance_windows import WindowForm
from resource_manager.manager.results import SlurmJob
from resource_manager.manager.wording import What
from resource_manager.rest.answers import MAX_HOLD_S

MAX_BATCH = 1000
PAGE_LIMIT = 1000


class Query(BaseModel, extra="forbid"):
    """Texts from a caller; unknown keys are refused, so that a misspelt option is not ignored."""


class Body(BaseModel, extra="forbid", strict=True):
    """JSON from a caller, the same: `true` is no number, and a text none either."""


class RestDemand(Demand):
    """Demand whose original names come in pairs, as the original's service requires them."""

    @model_validator(mode="wrap")
    @classmethod
    def _in_pairs(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        originals = isinstance(data, dict) and isinstance(data.get("required_gpus"), int)
        if originals and not data.keys() & {"gpus", "cpus"}:
            data = {"required_cpus": None, **data}
        return handler(data)


class AllocateBody(RestDemand, json_schema_extra={"example": {"task_id": "test_001", "gpus": 4, "cpus": 32}}):
    """`POST /api/allocate`, `/api/submit` and the items of a batch."""


class AnnounceBody(AllocateBody):
    """`POST /api/announce`."""

    after: list[LeaseId] = Field(
        default_factory=list, max_length=MAX_AFTER, description="Ids of the tasks that end before it asks."
    )
    copies: Annotated[int, Field(strict=True, ge=0, le=MAX_COPIES)] = Field(
        default=1, description="Number of mapped tasks, 0 if it is not known yet."
    )


class WithdrawBody(Body):
    """`POST /api/withdraw`."""

    task_ids: list[LeaseId] = Field(default_factory=list, max_length=MAX_ANNOUNCED)
    run: Annotated[str, Field(max_length=1000)] = Field(
        default="", description="All tasks of the DAG run whose ids begin so, before /task."
    )
    reason: Text = Field(default="", description="Reason, for the history.")


class BatchBody(Body):
    """`POST /api/allocate/batch`."""

    requests: list[AllocateBody] = Field(min_length=1, max_length=MAX_BATCH)


Exact = Annotated[
    bool,
    Field(
        description="True: task_id is a whole lease id, as programs know it. Else it may be the short id, "
        "dag.task or dag.task[3] of what no fencing token or sequence tells apart."
    ),
]


class LeaseBody(Body):
    """Lease that a call acts on."""

    task_id: LeaseId
    exact: Exact = False
    fencing_token: Annotated[int, Field(ge=0, le=2**53)] | None = Field(
        default=None, description="Act only on the lease with this fencing token."
    )


CheckpointAt = Annotated[
    Annotated[float, Field(ge=0, le=MAX_TIME_S, allow_inf_nan=False)] | None,
    Field(description="When the job last saved what it did, seconds since the epoch."),
]


class RenewBody(LeaseBody):
    """`POST /api/renew`."""

    checkpoint_at: CheckpointAt = None
    for_s: Annotated[float, Field(gt=0, le=MAX_RENEWAL_S, allow_inf_nan=False)] | None = Field(
        default=None, description="Life until the next renewal, in seconds, if that is longer than its TTL."
    )


class RenewalItem(Body):
    """Renewal of one lease of `POST /api/renew/batch`."""

    task_id: LeaseId
    fencing_token: Annotated[int, Field(ge=0, le=2**53)]
    checkpoint_at: CheckpointAt = None


class RenewBatchBody(Body):
    """`POST /api/renew/batch`."""

    renewals: list[RenewalItem] = Field(min_length=1, max_length=MAX_BATCH)


class PreemptBody(LeaseBody):
    """`POST /api/preempt`."""

    preemptor: Annotated[str, Field(max_length=1000)] = Field(
        default="",
        description="Pending request that gets what becomes free; omitted: the first that waits for it.",
    )
    dry_run: bool = Field(default=False, description="Answer what would be preempted, and change nothing.")


class ReleaseBody(LeaseBody):
    """`POST /api/release`."""

    outcome: Text = Field(default="", description="Outcome of the task, for the history.")
    job_end: JobEnd = Field(
        default=JobEnd.UNKNOWN,
        description="If its job was placed: ended, a launcher saw that it is gone; gone, an operator's word; "
        "forced, nobody knows: the lease is quarantined. Else such a release is refused with 409.",
    )
    reason: Text = Field(default="", description="Reason, for the history; gone needs one.")
    failed_nodes: Annotated[list[Text], Field(max_length=1000)] = Field(
        default_factory=list,
        description="Servers on which the job could not be started; the task's next request avoids them.",
    )
    ranks: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = Field(
        default=None,
        description="Members of a gang to end; the others stay quarantined. It needs the fencing token.",
    )

    @model_validator(mode="after")
    def _of_one_lease(self) -> Self:
        if self.ranks is not None and self.fencing_token is None:
            raise ValueError("ranks needs fencing_token beside it")
        return self


class PlaceOfJob(Body):
    """Where the job of one member is about to start, as `core.models.JobPlace`."""

    launcher: Annotated[Text, Field(min_length=1)]
    address: Text = ""
    conn_id: Text = ""
    machine: Text = ""
    folder: Text = ""
    mark: Text = ""
    user: Text = ""
    walls: Text = ""


class PlaceBody(LeaseBody):
    """`POST /api/place`."""

    fencing_token: Annotated[int, Field(ge=0, le=2**53)]
    places: Annotated[list[PlaceOfJob], Field(min_length=1, max_length=10_000)] = Field(
        description="Places by member, in the order of the ranks."
    )


class SubmitBody(AllocateBody):
    """`POST /api/submit`."""

    job: dict[str, Any] | None = Field(
        default=None,
        exclude=True,
        description="Job that the agent of its server runs: command, env, image; stored with the request.",
    )


class CancelBody(Body):
    """`POST /api/cancel`."""

    task_id: LeaseId
    exact: Exact = False
    sequence: int | None = Field(default=None, description="The queue entry to remove; omitted: the current.")
    reason: Text = Field(default="", description="Reason, for the history.")


class ResumeBody(Body):
    """`POST /api/servers/<id>/resume`."""

    gpu: Annotated[int, Field(ge=0, lt=2**31)] | Uuid | None = Field(
        default=None, description="One GPU, by number or UUID; omitted: the server."
    )


class DrainBody(ResumeBody):
    """`POST /api/servers/<id>/drain`."""

    reason: Text = ""
    failed: bool = Field(
        default=False, description="Mark the server as failed (state ERROR), not only drained."
    )


class SearchedBody(Body):
    """`POST /api/servers/<id>/searched`."""

    jobs: Annotated[list[Text], Field(max_length=10_000)] = Field(
        description="Names of all jobs that run there, as a launcher lists them."
    )
    age_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0, description="Seconds since the look began."
    )


class AdoptedGpu(Body):
    """One GPU of `POST /api/servers/<id>/adopt`, as an inventory has it."""

    gpu_id: Annotated[int, Field(ge=0, lt=2**31)]
    uuid: Uuid | Literal[""] = ""
    type: Text = ""
    vendor: Vendor = "nvidia"
    memory_mib: Annotated[int, Field(ge=0, lt=2**53)] = 0


class AdoptBody(Body):
    """`POST /api/servers/<id>/adopt`: the server's GPUs from now on."""

    gpus: list[AdoptedGpu] = Field(max_length=MAX_GPUS_OF_SERVER)


class ResetBody(Body):
    """`POST /api/reset`: ends every lease and removes every pending request."""

    confirm: Literal[True] = Field(description="Must be true: all leases and the queue are lost.")


class ClusterBody(Body):
    """`PUT /api/cluster`: sections of a cluster's file as JSON, each the whole of its kind."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "sections": {"cluster": {"order": "fair_tree"}, "teams": {"vision": {"guaranteed": 16}}},
                "dry_run": True,
            }
        },
    )

    sections: ClusterForm = Field(description="What is to be changed.")
    revision: str | None = Field(
        default=None, description="Revision of the stored cluster that must still be in force."
    )
    remove: list[str] = Field(
        default_factory=list,
        description="Sections to end: cluster, teams, maintenance, health, sign_on, notices.",
    )
    retire: list[str] = Field(
        default_factory=list, description="Servers that leave although they have leases, once those ended."
    )
    force: bool = Field(default=False, description="Take the GPUs of the sections, not those adopted.")
    dry_run: bool = Field(default=False, description="Answer what would change, and change nothing.")


class MaintenanceBody(WindowForm):
    """`POST /api/maintenance`: a window to add."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "servers": ["server-1"],
                "from": "2126-12-01T08:00+01:00",
                "until": "2126-12-01T12:00+01:00",
                "reason": "new fans",
            }
        }
    )

    dry_run: bool = Field(default=False, description="Answer what would be added, and change nothing.")


class MaintenanceRemoveBody(Body):
    """`POST /api/maintenance/remove`: the window to remove."""

    id: Annotated[int, Field(ge=1, le=2**53)] = Field(description="Number of the window.")
    dry_run: bool = Field(default=False, description="Answer what would be removed, and change nothing.")


class SlurmBody(Body):
    """All that is known of the jobs of a cluster of Slurm."""

    cluster: Annotated[Text, Field(min_length=1, max_length=200)] = Field(description="Name of the cluster.")
    jobs: Annotated[list[SlurmJob], Field(max_length=10_000)] = Field(description="Its jobs.")


class PageQuery(Query):
    """Limits of one page of a list."""

    limit: Annotated[int, Field(ge=1, le=PAGE_LIMIT)] = 100
    after: Annotated[int, Field(ge=0, le=2**53)] = Field(
        default=0, description="`next` of the previous page."
    )


class ChangesQuery(Query):
    """`GET /api/leases/changes`."""

    after: Annotated[int, Field(ge=-1, le=2**53)] = Field(
        default=-1, description="`version` of the previous answer; omitted: all leases and requests."
    )
    timeout_s: Annotated[float, Field(ge=0, le=MAX_HOLD_S)] = Field(
        default=0.0, description="Longest time until the answer, in seconds, if nothing changes."
    )
    prefix: Annotated[str, Field(max_length=1000)] = Field(
        default="", description="Only of lease ids that begin with this."
    )


class HistoryQuery(PageQuery):
    """`GET /api/history`: `limit` counts the changes that are looked at."""

    by: Annotated[str, Field(max_length=MAX_BY)] = Field(
        default="", description="Only changes that this name asked for; * stands for any text."
    )
    what: What | None = Field(default=None, description="Only changes that do this.")


class GpusQuery(PageQuery):
    """`GET /api/gpus`: of all servers, a page at a time, or of some; repeat the key for several."""

    servers: list[Text] = Field(default=[], max_length=PAGE_LIMIT, description="Names of the servers.")


class ListQuery(Query):
    """A list as a whole or, with `limit`, a page of it, cut by position."""

    limit: Annotated[int, Field(ge=1, le=100_000)] | None = None
    after: Annotated[int, Field(ge=0, le=2**53)] = 0


class TaskQuery(Query):
    """`GET /api/task`."""

    task_id: LeaseId
    exact: Exact = False
    pending: bool | None = Field(
        default=None, description="True: only a pending request; false: only a lease; omitted: either."
    )
    fencing_token: Annotated[int, Field(ge=0, le=2**53)] | None = Field(
        default=None, description="Only the lease with this fencing token, which may be a gang's remainder."
    )
    timeout_s: Annotated[float, Field(ge=0, le=MAX_HOLD_S)] = Field(
        default=0.0, description="Longest time until the answer, in seconds, while the request is pending."
    )


class NameQuery(Query):
    """`GET /api/task/explain`."""

    name: LeaseId = Field(description="Full lease id, short id, dag.task[3] or dag.task.")


class ExplainQuery(WhatIf, RestDemand):
    """`GET /api/explain`; in a query, lists and pairs repeat their key: `gpu_types=A100&gpu_types=H100`."""

    @model_validator(mode="wrap")
    @classmethod
    def _of_texts(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return handler(from_texts(data) if isinstance(data, dict) else data)


class UsageHistoryQuery(Query):
    """`GET /api/trends`."""

    hours: Annotated[float, Field(ge=0.1, le=168)] = 24
