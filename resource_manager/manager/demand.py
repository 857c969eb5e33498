"""`Demand`, all that a task may ask for; `requests` makes a `Request` of it on the servers there are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from itertools import islice
from typing import Annotated, Any, Literal, Self, TypedDict, Unpack, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError

from resource_manager.core.models import MAX_PRIORITY, MILLI_PER_GPU, PREEMPT_GRACE_S, Amount
from resource_manager.errors import InvalidRequestError
from resource_manager.manager.arguments import ALIASES, Dumpable, arguments_of, what_if_id
from resource_manager.manager.demand_fields import (
    MAX_COUNT,
    PRINTABLE,
    WHOLE,
    Count,
    Deadline,
    Delay,
    Label,
    Labels,
    LeaseId,
    Name,
    Percent,
    Quantity,
    Seconds,
    ServerRef,
    Text,
    Whole,
    Worth,
    gpu_memory_of,
    pairs_of,
    shown,
)
from resource_manager.words import Words

_MAX_ERRORS = 100
"""Errors of one demand that are told: a body of 60,000 unknown names costs no second of processor time."""
_SHOULD = re.compile(r"^[A-Z]\w+ should ")
_VERBS = ("must ", "may ", "is ", "has ", "names ")
_CHARACTERS = re.compile(r"\^\[(?!\^)(.+)\][+*]\$")
"""A pattern that lists the characters which a text may have."""

_NO_RESOURCES = {
    "cpus": "are a field of their",
    "gpus": "are a field of their",
    "gpu_milli": "is a field of its",
}
"""Names that no other resource may have: amounts of both would count as one."""


class Demand(BaseModel, extra="forbid", frozen=True, defer_build=True):
    """The demand of a task. REST bodies, options, operators, forms and `explain` derive from these fields.

    The original's names (`ALIASES`) are accepted for the fields they name; errors use the one given.
    """

    lease_id: LeaseId = Field(
        description="Id of the lease; the same id and shape again gives the same lease."
    )
    gpus: Count = Field(description="Whole GPUs of one server; 1 is meant where gpu_milli is given alone.")
    gpu_milli: Annotated[Whole, Field(ge=1, le=MILLI_PER_GPU)] = Field(
        default=MILLI_PER_GPU, description="Thousandths of one GPU; below 1000 gpus must be 1."
    )
    cpus: Count = Field(default=1, description="CPUs of the same server; 1 if omitted.")
    resources: Annotated[dict[Name, Quantity], BeforeValidator(pairs_of), Field(max_length=50)] = Field(
        default_factory=dict, description="Further amounts by name, such as memory_mib=4096."
    )
    gpu_types: Annotated[list[Name], Field(max_length=50)] = Field(
        default_factory=list, description="Types of GPU allowed; empty: any."
    )
    types: Literal["first", "best"] = Field(
        default="best", description="Of gpu_types the first that fits now, or best: the policy's choice."
    )
    gpu_memory: Annotated[Text, BeforeValidator(gpu_memory_of)] = Field(
        default="", description="Least memory of each GPU, or of the fraction: 40GB, or 22.5GiB exactly."
    )
    link: Literal["require", "prefer", "any"] = Field(
        default="prefer",
        description="GPUs of a server that NVLink or a NUMA node joins: require, prefer, or any GPUs.",
    )
    vendor: Text = Field(default="", description="Vendor of the GPUs; empty: any.")
    labels_required: Labels = Field(
        default_factory=dict, description="Labels that the server must have in the inventory, such as zone=a."
    )
    prefer_server: ServerRef | None = Field(default=None, description="Server to try first: name or id.")
    server: ServerRef | None = Field(default=None, description="The only server allowed: name or id.")
    nodes: Annotated[Whole, Field(ge=1, le=MAX_COUNT)] = Field(
        default=1, description="Members of a gang, each with this demand, in one lease on as many servers."
    )
    spread: Literal["servers", "pack"] = Field(
        default="servers", description="One member of a gang a server, or pack: several where they fit."
    )
    same: Label = Field(
        default="", description="Label of which all servers of a gang must have one value, such as rack."
    )
    prefer_same: Label = Field(
        default="", description="Label of which the servers of a gang should have one value."
    )
    team: Text = Field(default="", description="Team whose share of the cluster is charged.")
    owner: Text = Field(
        default="", description="Owner of the lease; only an operator may name another than themselves."
    )
    priority: Annotated[Whole, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = Field(
        default=0, description="Higher starts first if the queue order uses priorities."
    )
    expected_runtime: Seconds | None = Field(
        default=None, description="Expected runtime, in seconds or as 2h; shorter ones may fill gaps."
    )
    ttl: Seconds | None = Field(
        default=None, description="Life without renewal, in seconds or as 2h; default: the manager's."
    )
    utility: Worth | None = Field(
        default=None, description="Value of finishing well before the target; for admission by price."
    )
    target: Seconds | None = Field(
        default=None, description="Age at which the utility has halved, in seconds or as 2h."
    )
    sensitivity: Worth = Field(
        default=0.0, description="Steepness of the utility's fall around the target, per second."
    )
    quarantine: bool = Field(
        default=False,
        strict=True,
        description="Keep the GPUs allocated after expiry until the job is known to be gone.",
    )
    preemptible: bool = Field(
        default=True,
        strict=True,
        description="The lease may be taken for a team inside its guarantee or a higher priority; if not, it "
        "stops at the team's guarantee.",
    )
    preempt_grace: Annotated[Delay, Field(le=86_400)] = Field(
        default=PREEMPT_GRACE_S,
        description="Time for a preempted job to save what it did, in seconds or as 2min; then it is killed.",
    )
    preempt_signal: Literal["TERM", "USR2"] = Field(
        default="TERM", description="Signal that tells a job that it is preempted: TERM or USR2."
    )
    preemption_delay: Delay | None = Field(
        default=None,
        description="Wait before it preempts others, in seconds or as 2min; default: that of the teams file.",
    )
    labels: Labels = Field(default_factory=dict, description="Labels of the lease, such as model=bert.")
    idle_below: Percent | None = Field(
        default=None, description="Utilization in percent below which its GPUs count as idle."
    )
    idle_after: Seconds | None = Field(
        default=None, description="Time of idle GPUs after which the lease is reported, in seconds or as 2h."
    )
    idle_action: Literal["", "warn", "release"] = Field(
        default="", description="warn, or release: after that time the lease ends; empty: as its team's."
    )
    on_idle: Literal["end", "requeue"] = Field(
        default="end", description="After an idle release the task ends, or requeue: it waits again."
    )
    max_runtime: Seconds | None = Field(
        default=None, description="Longest runtime, in seconds or as 2h; then it has had its grace and ends."
    )
    requeue_after: Seconds | None = Field(
        default=None,
        description="Runtime after which the job saves its work and waits again, in seconds or as 2h.",
    )
    deadline: Deadline | None = Field(
        default=None,
        description="Time by which the task should have ended, with its zone; or as 6h: after the request.",
    )

    @cached_property
    def names(self) -> dict[str, str]:
        """Fields that were given by their original's names -> these names.

        Not a private attribute, which pydantic would take longer to set than to check a field.
        """
        return {}

    @classmethod
    def of(
        cls,
        lease_id: Dumpable | str | None = None,
        gpus: int | None = None,
        cpus: int | None = None,
        prefer_server: int | str | None = None,
        **options: Unpack[DemandArguments],
    ) -> Demand:
        """Return the demand of a Python caller's arguments; raises `InvalidRequestError`, the first error."""
        asked = (lease_id, gpus, cpus, prefer_server)
        if isinstance(lease_id, Demand) and asked[1:] == (None, None, None) and not options:
            return lease_id
        try:
            return cls.model_validate(arguments_of(asked, options))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            words = complaint(str(first["loc"][0]), first["ctx"]["words"])
            raise InvalidRequestError(words) from None

    @field_validator("resources")
    @classmethod
    def _no_other_fields(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, its in _NO_RESOURCES.items():
            if name in value:
                raise ValueError(f"has {name}, which {its} own: {name}")
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _under_one_name(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        names: dict[str, str] = {}
        if isinstance(data, (dict, Mapping)):  # asking the abstract class alone takes ten times as long
            data, names = _without_aliases(data)
            if data.get("gpu_milli") is not None and data.get("gpus") is None:
                data["gpus"] = 1
        try:
            demand = handler(data)
        except ValidationError as error:
            found = {
                entry["loc"][:1]: entry for entry in error.errors(include_url=False)
            }  # of a union the last
            lines = [_named(entry, names) for entry in islice(found.values(), _MAX_ERRORS)]
            raise ValidationError.from_exception_data(error.title, lines) from None
        if names:
            demand.names.update(names)
        return demand

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the original's names, of which one is enough for a required field."""
        schema = handler.resolve_ref_schema(handler(core))
        for alias, name in ALIASES.items():
            own = schema["properties"][name]
            also = {"title": alias, "description": f"Name of `{name}` in the original design."}
            schema["properties"][alias] = {**own, **also}
        schema["required"] = [name for name in schema["required"] if name not in ALIASES.values()]
        return schema


class WhatIf(Demand):
    """A demand that is only asked about: of no lease, unless it says of which."""

    lease_id: LeaseId = Field(default_factory=what_if_id, description="Id of a lease; omitted: of none.")


class DemandOptions(TypedDict, total=False):
    """Fields of a `Demand` besides `POSITIONAL`, for type checkers; None leaves a field at its default."""

    gpu_milli: int | None
    resources: Mapping[str, Amount] | None
    gpu_types: Sequence[str] | None
    types: str | None
    gpu_memory: str | None
    link: str | None
    vendor: str | None
    labels_required: Mapping[str, str] | None
    server: int | str | None
    nodes: int | None
    spread: str | None
    same: str | None
    prefer_same: str | None
    team: str | None
    owner: str | None
    priority: int | None
    expected_runtime: float | timedelta | None
    ttl: float | timedelta | None
    utility: float | None
    target: float | timedelta | None
    sensitivity: float | None
    quarantine: bool | None
    preemptible: bool | None
    preempt_grace: float | timedelta | None
    preempt_signal: str | None
    preemption_delay: float | timedelta | None
    labels: Mapping[str, str] | None
    idle_below: float | None
    idle_after: float | timedelta | None
    idle_action: str | None
    on_idle: str | None
    max_runtime: float | timedelta | None
    requeue_after: float | timedelta | None
    deadline: float | timedelta | datetime | str | None


class DemandArguments(DemandOptions, total=False):
    """The same, and the names of the original design."""

    task_id: str | None
    required_gpus: int | None
    required_cpus: int | None
    prefer_server_id: int | str | None


KINDS = {
    name: get_origin(field.annotation) or field.annotation for name, field in Demand.model_fields.items()
}
"""Field of a demand -> int, float, str, bool, list, dict or a union."""


def _without_aliases(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the data under the names of the fields, and the original's names that it used."""
    values, names = dict(data), {}
    for alias, name in ALIASES.items():
        if alias not in values:
            continue
        value = values.pop(alias)
        if values.get(name) not in (None, value):
            words = Words("is {!r}, and {} is {!r}: give one of them", values[name], alias, value)
            wrong = PydanticCustomError("two_values", "{words}", {"words": words})
            twice: InitErrorDetails = {"type": wrong, "loc": (name,), "input": value}
            raise ValidationError.from_exception_data("Demand", [twice])
        if values.get(name) is None:
            values[name] = value
            names[name] = alias
    return values, names


def _named(entry: ErrorDetails, names: Mapping[str, str]) -> InitErrorDetails:
    """Return an error in plain words and under the caller's name of the field."""
    field, *inside = entry["loc"] or ("",)
    name, message = _printable(field), in_words(entry)
    if entry["type"] == "missing":
        message = "is missing"
    elif entry["type"] == "extra_forbidden":
        message = "is not a field of a demand"
    if inside and KINDS.get(name) is dict:
        message = f"{_printable(inside[0])} {message}"
    words = entry.get("ctx", {}).get("words") or Words("{}", message)
    return {
        "type": PydanticCustomError(entry["type"], "{words}", {"words": words.renamed(names)}),
        "loc": (names.get(name, name),),
        "input": entry["input"],
    }


def in_words(entry: ErrorDetails) -> str:
    """Return an error's text without the words and patterns of pydantic, with the value that is wrong."""
    if pattern := entry.get("ctx", {}).get("pattern"):
        if pattern == PRINTABLE:
            return "has a control or an invisible character"
        plain = _CHARACTERS.fullmatch(pattern)
        rule = f"may have only the characters {plain[1]}" if plain else f"must be of the form {pattern}"
        return f"{rule}, got {shown(entry['input'])}"
    if _SHOULD.match(entry["msg"]):
        rule = _SHOULD.sub("must ", entry["msg"]).replace("valid tuple", "valid list")
        return f"{rule}, got {shown(entry['input'])}"
    return entry["msg"].removeprefix("Value error, ")


def complaint(field: str, words: Words | str) -> Words:
    """Return the sentence about a field: `gpus must be …`, or `gpus: …` of words that begin with no verb."""
    colon = "" if str(words).startswith(_VERBS) else ":"
    return Words("{}{} {}", Words.parameter(field), colon, words)


def _printable(key: object) -> str:
    return (str(key) if str(key).isprintable() else ascii(key))[:100]


def given_value(value: Any) -> Any:
    """Return the value, a text without its outer spaces; None for an empty text or the text `None`."""
    if isinstance(value, str):
        value = value.strip()
        return None if value in ("", "None") else value
    return value


def from_texts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a demand with the texts of templates, forms, queries and options in their types.

    Lists are separated by commas; an empty text, and `None` as a template renders it, leaves a field out.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        kind = KINDS.get(ALIASES.get(name, name))
        value = given_value(value)
        if isinstance(value, str):
            if kind is int and WHOLE.fullmatch(value):
                value = int(value)
            elif kind is bool:
                value = {"true": True, "false": False}.get(value.lower(), value)
            elif kind in (list, dict):
                value = [part.strip() for part in value.split(",") if part.strip()]
        elif kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None:
            found[name] = value
    return found
