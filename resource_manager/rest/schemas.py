"""Bodies, queries and answers of the REST service; the OpenAPI document is generated from them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from resource_manager.core.identifiers import MAX_TEXT, UNPRINTABLE
from resource_manager.core.models import MAX_PRIORITY
from resource_manager.manager.demand import fraction_advice

MAX_BATCH = 1000
PAGE_LIMIT = 1000
MAX_COUNT = 1_000_000

PRINTABLE = f"^[^{UNPRINTABLE}]*$"
NAMED_AMOUNT = f"^[^={UNPRINTABLE}]{{1,250}}=[0-9]{{1,15}}(\\.[0-9]{{1,15}})?$"
MISMATCHES = {
    PRINTABLE: "has a control or an invisible character",
    NAMED_AMOUNT: "is not NAME=AMOUNT, the amount a number from 0",
}
"""Pattern -> error message for a text that does not match it."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=250, pattern=PRINTABLE)]
TaskId = Annotated[str, StringConstraints(min_length=1, max_length=1000, pattern=PRINTABLE)]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT, pattern=PRINTABLE)]
Seconds = Annotated[float, Field(gt=0, le=10 * 365 * 86_400, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
ServerRef = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)] | Name
NamedAmount = Annotated[str, StringConstraints(pattern=NAMED_AMOUNT)]
Worth = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Quantity = (
    Annotated[int, Field(strict=True, ge=0, le=2**53)]
    | Annotated[float, Field(ge=0, le=2**53, allow_inf_nan=False)]
)

_DIGITS = re.compile("[0-9]{1,9}")

OTHER_NAME = {"gpus": "required_gpus", "required_cpus": "cpus", "prefer_server": "prefer_server_id"}
"""Pairs of names of one value: the one that `Sizes` declares later, and the other."""


class Body(BaseModel):
    """Input from a caller; unknown keys are refused, so that a misspelt option is not ignored."""

    model_config = ConfigDict(extra="forbid")


class Sizes(Body):
    """GPUs and CPUs of one server, and the server, under the current names or the original design's."""

    required_gpus: Count | None = Field(default=None, description="Name of `gpus` in the original design.")
    gpus: Count | None = Field(
        default=None,
        validate_default=True,
        description="Whole GPUs of one server, or 1 with a GPU fraction gpu_milli.",
    )
    cpus: Count | None = Field(default=None, description="CPUs of the same server; 1 if omitted.")
    required_cpus: Count | None = Field(
        default=None,
        validate_default=True,
        description="Name of `cpus` in the original design; required with required_gpus.",
    )
    prefer_server_id: ServerRef | None = Field(
        default=None, description="Name of `prefer_server` in the original design."
    )
    prefer_server: ServerRef | None = Field(default=None, description="Server to try first: name or id.")
    server: ServerRef | None = Field(default=None, description="The only server allowed: name or id.")

    @field_validator("gpus", "required_gpus", mode="before")
    @classmethod
    def _no_share(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, float | str) and (advice := fraction_advice(value, info.field_name or "")):
            raise PydanticCustomError(
                "whole_gpus",
                "must be a whole number, got {got}{advice}",
                {"got": repr(value), "advice": advice},
            )
        return value

    @field_validator("gpus", "required_cpus", "prefer_server")
    @classmethod
    def _in_one_name(cls, value: Any, info: ValidationInfo) -> Any:
        """Compare the later field of a pair with the other, which is validated by then."""
        name, data = info.field_name, info.data
        other = OTHER_NAME[name or ""]
        if other not in data:  # the other is invalid and has its own error
            return value
        if value is None and data[other] is None:
            originals = data.get("gpus", 0) is None and data.get("required_gpus") is not None
            if name == "gpus" or (name == "required_cpus" and originals):
                raise PydanticKnownError("missing")
        elif value is not None and data[other] is not None and value != data[other]:
            raise PydanticCustomError(
                "two_values",
                "is {mine}, and {other} is {others}: give one of them",
                {"mine": repr(value), "other": other, "others": repr(data[other])},
            )
        return value


class Demand(Sizes):
    """Demand on one server."""

    gpu_milli: Annotated[int, Field(strict=True, ge=1, le=1000)] = Field(
        default=1000, description="Thousandths of one GPU; below 1000 gpus must be 1."
    )
    gpu_types: list[Name] = Field(default=[], max_length=50, description="Types allowed; empty: any.")
    vendor: Text = Field(default="", description="Vendor of the GPUs; empty: any.")
    resources: dict[Name, Quantity] = Field(
        default={}, max_length=50, description="Further amounts by name, such as memory_mib."
    )
    expected_runtime_s: Seconds | None = Field(
        default=None, description="Expected runtime of the task, in seconds."
    )
    utility: Worth | None = Field(
        default=None, description="Value of finishing in time; used by admission by price."
    )
    target_s: Seconds | None = Field(
        default=None, description="Age at which the utility has halved, in seconds."
    )
    sensitivity_per_s: Worth = Field(
        default=0.0, description="Steepness of the utility's fall around target_s, per second."
    )

    @field_validator("resources")
    @classmethod
    def _not_the_cpus(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "cpus" in value:
            raise ValueError("cpus are named by a field of their own")
        return value


class AllocateBody(Demand):
    """`POST /api/allocate`, `/api/submit` and the items of a batch."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"example": {"task_id": "test_001", "gpus": 4, "cpus": 32}},
    )

    task_id: TaskId = Field(description="Id of the lease; the same id and shape again gives the same lease.")
    priority: Annotated[int, Field(strict=True, ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    team: Text = ""
    owner: Text = Field(
        default="", description="Owner of the lease; only an operator may name another than themselves."
    )
    ttl_s: Seconds | None = Field(default=None, description="Life of the lease without renewal, in seconds.")
    quarantine: bool = Field(
        default=False, description="Keep the GPUs allocated after expiry until the job is known to be gone."
    )
    labels: dict[Name, Text] = Field(default={}, max_length=50)


class BatchBody(Body):
    """`POST /api/allocate/batch`."""

    requests: list[AllocateBody] = Field(min_length=1, max_length=MAX_BATCH)


class LeaseBody(Body):
    """`POST /api/renew`."""

    task_id: TaskId
    fencing_token: Annotated[int, Field(strict=True, ge=0, le=2**53)] | None = Field(
        default=None, description="Act only on the lease with this fencing token."
    )


class ReleaseBody(LeaseBody):
    """`POST /api/release`."""

    outcome: Text = Field(default="", description="Outcome of the task, for the history.")


class CancelBody(Body):
    """`POST /api/cancel`."""

    task_id: TaskId
    sequence: int | None = Field(default=None, description="The queue entry to remove; omitted: the current.")
    reason: Text = Field(default="", description="Reason, for the history.")


class DrainBody(Body):
    """`POST /api/servers/<id>/drain`."""

    reason: Text = ""
    failed: bool = Field(
        default=False, description="Mark the server as failed (state ERROR), not only drained."
    )


class NoBody(Body):
    """Body of a change without arguments: an empty object, or no body."""


class ResetBody(Body):
    """`POST /api/reset`: ends every lease and removes every pending request."""

    confirm: Literal[True] = Field(description="Must be true: all leases and the queue are lost.")


class PageQuery(Body):
    """Limits of one page of a list."""

    limit: Annotated[int, Field(ge=1, le=PAGE_LIMIT)] = 100
    after: Annotated[int, Field(ge=0, le=2**53)] = Field(
        default=0, description="`next` of the previous page."
    )


class StatusQuery(Body):
    """`GET /api/status`: all servers, or one page of them."""

    limit: Annotated[int, Field(ge=1, le=100_000)] | None = None
    after: Annotated[int, Field(ge=0, le=2**53)] = 0


class TaskQuery(Body):
    """`GET /api/task`."""

    task_id: TaskId


class ExplainQuery(Sizes):
    """`GET /api/explain`; in a query, lists repeat their key: `gpu_types=A100&gpu_types=H100`.

    It has no fields that do not affect the answer (owner, labels, TTL).
    """

    gpu_milli: Annotated[int, Field(ge=1, le=1000)] = 1000
    gpu_types: list[Name] = Field(default=[], max_length=50)
    vendor: Text = ""
    resources: list[NamedAmount] = Field(
        default=[], max_length=50, description="Further amounts, such as memory_mib=4096."
    )
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    team: Text = ""
    expected_runtime_s: Seconds | None = None
    utility: Worth | None = None
    target_s: Seconds | None = None
    sensitivity_per_s: Worth = 0.0

    @field_validator("gpus", "cpus", "required_gpus", "required_cpus", mode="before")
    @classmethod
    def _number_of_text(cls, value: object) -> object:
        return int(value) if isinstance(value, str) and _DIGITS.fullmatch(value) else value

    @field_validator("resources")
    @classmethod
    def _each_once(cls, value: list[str]) -> list[str]:
        names = [item.partition("=")[0] for item in value]
        if "cpus" in names:
            raise ValueError("cpus are named by a field of their own")
        if len(set(names)) != len(names):
            raise ValueError("a name is given twice")
        return value

    def demand(self) -> dict[str, Any]:
        """Return the manager's arguments."""
        pairs = (item.partition("=") for item in self.resources)
        amounts = {name: float(amount) if "." in amount else int(amount) for name, _, amount in pairs}
        return {**self.model_dump(exclude_none=True), "resources": amounts}


class UsageHistoryQuery(Body):
    """`GET /api/trends`."""

    hours: Annotated[float, Field(ge=0.1, le=168)] = 24


class Trend(BaseModel):
    """Columns of equal length; null for a time without data."""

    time: list[int] = Field(description="Starts of the steps, seconds since the epoch.")
    held: list[float | None] = Field(description="Allocated part of all GPUs, in percent.")
    queue: list[float | None] = Field(description="Mean length of the queue.")
    wait: list[float | None] = Field(description="Mean wait of the requests granted, seconds.")
    longest: list[float | None] = Field(description="Longest of these waits, seconds.")


class Answer(BaseModel):
    """Output of the service; clients must ignore unknown keys."""

    model_config = ConfigDict(extra="allow")


class Member(Answer):
    """One server of a lease, in the order of the ranks."""

    rank: int
    server_id: int
    server_name: str
    gpu_ids: list[int]


class Allocation(Answer):
    """Lease, with the original design's six keys first."""

    server_id: int
    server_name: str
    gpu_ids: list[int]
    cpu_count: int | float
    gpu_devices: str = Field(description="For CUDA_VISIBLE_DEVICES.")
    task_id: str
    members: list[Member]


class Submission(Answer):
    """Lease (`state` RUNNING) or pending request (WAITING), the latter with the reason: `kind`, `reason`."""

    task_id: str
    state: str


class RefusedRequest(Answer):
    """Refusal of a request of a batch: its kind and one sentence."""

    kind: str
    detail: str


class BatchAnswer(Answer):
    """Answers to a batch: an entry for each request, in order: its allocation, or null and a refusal."""

    results: list[Allocation | None]
    refusals: list[RefusedRequest | None]


class CallerAnswer(Answer):
    """The caller as the service knows them, and the teams they may name; none: any team."""

    name: str
    role: str
    teams: list[str]


class Done(Answer):
    """Confirmation of a change."""

    success: bool


class ServerSummary(Answer):
    """One server, with the original design's keys."""

    server_id: int
    server_name: str
    available_gpus: int
    closed_gpus: int = Field(description="Unused GPUs of a server that takes no new leases.")
    total_gpus: int
    available_cpus: int | float
    closed_cpus: int | float
    total_cpus: int | float
    running_tasks: int
    gpu_utilization: str
    cpu_utilization: str


class Status(Answer):
    """All servers, or a page of them."""

    total_servers: int
    servers: list[ServerSummary]


class Page(Answer):
    """One page of a list; `next` is null on the last one."""

    items: list[dict[str, Any]]
    next: int | None


class Explanation(Answer):
    """Explanation of a request: the place where it fits now, or the reason and the expected start."""

    fits: bool
    kind: str | None = Field(description="Kind of the obstacle; null if there is none.")
    reason: str = Field(description="The obstacle in one sentence.")


class Health(Answer):
    """Health of the service: `ok` if it reaches its store."""

    status: str


class Problem(Answer):
    """Problem (RFC 9457); `error` is the original design's. A refusal has a `kind`, such as `no_capacity`."""

    type: str
    title: str
    status: int
    detail: str
    error: str
