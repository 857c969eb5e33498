"""`Demand`, all that a task may ask for, and its conversion to a `Request` on the servers there are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import timedelta
from itertools import chain
from typing import Annotated, Any, Self, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError

from resource_manager.core.cluster import ClusterState
from resource_manager.core.identifiers import MAX_TEXT, UNPRINTABLE, check_names
from resource_manager.core.models import MAX_PRIORITY, MILLI_PER_GPU, Request, Utility
from resource_manager.errors import DuplicateTaskError, InvalidRequestError, UnknownNodeError
from resource_manager.manager.arguments import ALIASES, arguments_of
from resource_manager.manager.inventory_file import default_inventory
from resource_manager.scheduling import allocator
from resource_manager.settings import Settings
from resource_manager.storage.codec import as_stored

BUILT_IN = default_inventory()
BUILT_IN_GPUS = (2, 8)
"""The original's servers, and the minimum and maximum of GPUs that a task may request there."""

MAX_COUNT = 1_000_000
PRINTABLE = f"^[^{UNPRINTABLE}]*$"
_WHOLE = re.compile("-?[0-9]{1,15}")
_SHOULD = re.compile(r"^[A-Z]\w+ should ")


def _whole(value: object, info: ValidationInfo) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    advice = fraction_advice(value) if info.field_name == "gpus" else ""
    text = "must be a whole number, got {got}{advice}"
    raise PydanticCustomError("whole_number", text, {"got": f"{value!r:.100}", "advice": advice})


def _seconds(value: object) -> object:
    return value.total_seconds() if isinstance(value, timedelta) else value


def _pairs(value: object, info: ValidationInfo) -> object:
    """Return a list of `NAME=VALUE`, as options and queries give them, as a dictionary."""
    if not isinstance(value, list | tuple):
        return value
    found: dict[str, Any] = {}
    for item in value:
        name, equals, text = str(item).partition("=")
        if not name or not equals or name in found:
            wrong = "names {got} twice" if name in found else "must be NAME=VALUE, got {got}"
            raise PydanticCustomError("pairs", wrong, {"got": f"{item!r:.100}"})
        found[name] = _amount(text) if info.field_name == "resources" else text
    return found


def _amount(text: str) -> object:
    try:
        return int(text) if _WHOLE.fullmatch(text) else float(text)
    except ValueError:
        return text


Name = Annotated[str, StringConstraints(min_length=1, max_length=250, pattern=PRINTABLE)]
LeaseId = Annotated[str, StringConstraints(min_length=1, max_length=1000, pattern=PRINTABLE)]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT, pattern=PRINTABLE)]
Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=0, le=MAX_COUNT)]
ServerRef = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)] | Name
Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, le=10 * 365 * 86_400, allow_inf_nan=False)]
Worth = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Quantity = (
    Annotated[int, Field(strict=True, ge=0, le=2**53)]
    | Annotated[float, Field(strict=True, ge=0, le=2**53, allow_inf_nan=False)]
)
Labels = Annotated[dict[Name, Text], BeforeValidator(_pairs), Field(max_length=50)]


class Demand(BaseModel):
    """What a task asks for. REST bodies, options, operators, forms and `explain` derive from these fields.

    The original's names (`ALIASES`) are accepted for the fields they name; errors use the one given.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    lease_id: LeaseId = Field(
        description="Id of the lease; the same id and shape again gives the same lease."
    )
    gpus: Count = Field(description="Whole GPUs of one server, or 1 with a GPU fraction gpu_milli.")
    gpu_milli: Annotated[Whole, Field(ge=1, le=MILLI_PER_GPU)] = Field(
        default=MILLI_PER_GPU, description="Thousandths of one GPU; below 1000 gpus must be 1."
    )
    cpus: Count = Field(default=1, description="CPUs of the same server; 1 if omitted.")
    resources: Annotated[dict[Name, Quantity], BeforeValidator(_pairs), Field(max_length=50)] = Field(
        default={}, description="Further amounts by name, such as memory_mib=4096."
    )
    gpu_types: Annotated[list[Name], Field(max_length=50)] = Field(
        default=[], description="Types of GPU allowed; empty: any."
    )
    vendor: Text = Field(default="", description="Vendor of the GPUs; empty: any.")
    labels_required: Labels = Field(
        default={}, description="Labels that the server must have in the inventory, such as zone=a."
    )
    prefer_server: ServerRef | None = Field(default=None, description="Server to try first: name or id.")
    server: ServerRef | None = Field(default=None, description="The only server allowed: name or id.")
    team: Text = Field(default="", description="Team whose share of the cluster is charged.")
    owner: Text = Field(
        default="", description="Owner of the lease; only an operator may name another than themselves."
    )
    priority: Annotated[Whole, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = Field(
        default=0, description="Higher starts first if the queue order uses priorities."
    )
    expected_runtime: Seconds | None = Field(
        default=None, description="Expected runtime of the task, in seconds; shorter ones may fill gaps."
    )
    ttl: Seconds | None = Field(
        default=None, description="Life of the lease without renewal, in seconds; default: the manager's."
    )
    utility: Worth | None = Field(
        default=None, description="Value of finishing well before the target; for admission by price."
    )
    target: Seconds | None = Field(
        default=None, description="Age at which the utility has halved, in seconds."
    )
    sensitivity: Worth = Field(
        default=0.0, description="Steepness of the utility's fall around the target, per second."
    )
    quarantine: bool = Field(
        default=False,
        strict=True,
        description="Keep the GPUs allocated after expiry until the job is known to be gone.",
    )
    labels: Labels = Field(default={}, description="Labels of the lease, such as model=bert.")

    _names: dict[str, str] = PrivateAttr(default_factory=dict)
    """Fields that were given by their original's names -> these names."""

    @classmethod
    def of(cls, *asked: Any, **options: Any) -> Demand:
        """Return the demand of a Python caller's arguments; raises `InvalidRequestError`, the first error."""
        if len(asked) == 1 and isinstance(asked[0], Demand) and not options:
            return asked[0]
        try:
            return cls.model_validate(arguments_of(asked, options))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field, message = str(first["loc"][0]), first["msg"]
            colon = "" if message.startswith(("must ", "is ", "has ", "names ")) else ":"
            raise InvalidRequestError(f"{field}{colon} {message}", field=field) from None

    @field_validator("resources")
    @classmethod
    def _not_the_cpus(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "cpus" in value:
            raise PydanticCustomError("cpus", "has cpus, which are a field of their own: cpus")
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _under_one_name(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        names: dict[str, str] = {}
        if isinstance(data, Mapping):
            data, names = _without_aliases(data)
        try:
            demand = handler(data)
        except ValidationError as error:
            found = {
                entry["loc"][:1]: entry for entry in error.errors(include_url=False)
            }  # of a union the last
            lines = [_named(entry, names) for entry in found.values()]
            raise ValidationError.from_exception_data(error.title, lines) from None
        if names:
            demand._names = names
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
            raise ValidationError.from_exception_data(
                "Demand",
                [
                    {
                        "type": PydanticCustomError(
                            "two_values",
                            "is {mine}, and {alias} is {other}: give one of them",
                            {"mine": repr(values[name]), "alias": alias, "other": repr(value)},
                        ),
                        "loc": (name,),
                        "input": value,
                    }
                ],
            )
        if values.get(name) is None:
            values[name] = value
            names[name] = alias
    return values, names


def _named(entry: ErrorDetails, names: Mapping[str, str]) -> InitErrorDetails:
    """Return an error in plain words and under the caller's name of the field."""
    field, *inside = entry["loc"] or ("",)
    name, message = _printable(field), entry["msg"]
    if entry["type"] == "missing":
        message = "is missing"
    elif entry["type"] == "extra_forbidden":
        message = "is not a field of a demand"
    elif entry["type"] == "string_pattern_mismatch":
        message = "has a control or an invisible character"
    elif _SHOULD.match(message):
        message = f"{_SHOULD.sub('must ', message)}, got {entry['input']!a:.100}"
    if inside and KINDS.get(name) is dict:
        message = f"{_printable(inside[0])} {message}"
    if name in names:
        message = message.replace(f"{name}=", f"{names[name]}=")
    template = message.replace("{", "{{").replace("}", "}}")
    return {
        "type": PydanticCustomError(entry["type"], template),
        "loc": (names.get(name, name),),
        "input": entry["input"],
    }


def _printable(key: object) -> str:
    return f"{key if str(key).isprintable() else ascii(key):.100}"


def from_texts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a demand with the texts of templates, forms, queries and options in their types.

    Lists are separated by commas; an empty text, and `None` as a template renders it, leaves a field out.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        kind = KINDS.get(ALIASES.get(name, name))
        if isinstance(value, str):
            value = value.strip()
            if value in ("", "None"):
                continue
            if kind is int and _WHOLE.fullmatch(value):
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


REQUEST_NAMES = {
    "ttl_s": "ttl",
    "expected_runtime_s": "expected_runtime",
    "target_s": "target",
    "sensitivity_per_s": "sensitivity",
}
"""Names of a `Request` -> those of a `Demand`."""


def build_request(demand: Demand, cluster: ClusterState, settings: Settings) -> Request:
    """Return the request of this demand on these servers; raises `InvalidRequestError` (a `ValueError`).

    `gpus` must be in `gpu_range`, or 1 with a GPU fraction; `cpus` at most those of the largest server.
    """
    try:
        if demand.gpu_milli == MILLI_PER_GPU:
            _check_gpus(cluster, settings, demand.gpus)
        most_cpus = cluster.largest.get("cpus", 0)
        if not 1 <= demand.cpus <= most_cpus:
            raise InvalidRequestError(
                f"cpus must be between 1 and {most_cpus:g} (what the largest server has), got {demand.cpus}",
                field="cpus",
            )
        prefer, server = demand.prefer_server, demand.server
        request = Request(
            lease_id=demand.lease_id,
            gpus=demand.gpus,
            gpu_milli=demand.gpu_milli,
            resources={**demand.resources, "cpus": demand.cpus},
            gpu_types=tuple(demand.gpu_types),
            vendor=demand.vendor,
            preferred_node=None if prefer is None else server_name(cluster, prefer, "prefer_server"),
            required_node=None if server is None else server_name(cluster, server, "server"),
            priority=demand.priority,
            team=demand.team,
            owner=demand.owner,
            ttl_s=settings.lease_ttl_s if demand.ttl is None else demand.ttl,
            expected_runtime_s=demand.expected_runtime,
            quarantine=demand.quarantine,
            labels=demand.labels,
            utility=_utility(demand),
            labels_required=demand.labels_required,
        )
        return checked(request)
    except InvalidRequestError as error:
        error.rename({**REQUEST_NAMES, **demand._names})
        raise


def gpu_range(cluster: ClusterState, settings: Settings) -> tuple[int, int]:
    """Return the minimum and maximum of whole GPUs a task may request, by stored inventory and settings."""
    is_built_in, largest = _inventory_limits(cluster)
    least, most = BUILT_IN_GPUS if is_built_in else (1, max(largest, 1))
    if settings.max_gpus is not None:
        most = settings.max_gpus
        least = min(least, most)
    if settings.min_gpus is not None:
        least = settings.min_gpus
        most = max(least, most)
    return least, most


def _inventory_limits(cluster: ClusterState) -> tuple[bool, int]:
    """Return whether the inventory is the built-in one, and the GPUs of its largest server.

    Computed once for each inventory: every inventory gives the cluster a new `largest`.
    """
    known = cluster.policy_cache.get(_inventory_limits)
    if known is None or known[0] is not cluster.largest:
        nodes = tuple(state.node for state in cluster.nodes if not state.retired)
        largest = max((len(node.gpus) for node in nodes), default=0)
        known = cluster.policy_cache[_inventory_limits] = (cluster.largest, nodes == BUILT_IN, largest)
    return known[1], known[2]


def _check_gpus(cluster: ClusterState, settings: Settings, gpus: int) -> None:
    least, most = gpu_range(cluster, settings)
    if least <= gpus <= most:
        return
    is_built_in, largest = _inventory_limits(cluster)
    if gpus < least:
        setting, is_set, may_help = "GPU_MANAGER_MIN_GPUS", settings.min_gpus is not None, gpus >= 0
    else:
        setting, is_set, may_help = "GPU_MANAGER_MAX_GPUS", settings.max_gpus is not None, gpus <= largest
    if is_set:
        why = f"set by {setting}"
    else:
        why = "the inventory is the built-in one" if is_built_in else f"the largest server has {largest}"
        if may_help:
            why += f"; {setting} sets another limit"
    if least == most:
        raise InvalidRequestError(f"gpus must be {least}, got {gpus} ({why})", field="gpus")
    raise InvalidRequestError(f"gpus must be between {least} and {most} ({why}), got {gpus}", field="gpus")


def fraction_advice(wanted: object) -> str:
    """Return advice to request that GPU fraction, as the end of a message; empty if it is not a fraction."""
    try:
        milli = round(MILLI_PER_GPU * float(wanted))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return ""
    return f"; that GPU fraction is gpus=1, gpu_milli={milli}" if 0 < milli < MILLI_PER_GPU else ""


def checked(request: Request) -> Request:
    """Return the request as it is read back; raises `InvalidRequestError` if it must not be stored.

    A request that other processes could not read would lock all of them out of the state, and a name must
    not be able to forge a log line.
    """
    single = {name: (getattr(request, name),) for name in ("lease_id", "team", "owner", "vendor")}
    several = {
        "gpu_types": request.gpu_types,
        "resources": request.resources,
        "labels": chain.from_iterable(request.labels.items()),
        "labels_required": chain.from_iterable(request.labels_required.items()),
    }
    check_names({**single, **several})
    runtime_s = request.expected_runtime_s
    if runtime_s is not None and not 0 < runtime_s < math.inf:
        raise InvalidRequestError(
            f"expected_runtime_s must be a finite number above 0, got {runtime_s}", field="expected_runtime_s"
        )
    stored = as_stored(request)
    if abs(stored.priority) > MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}", field="priority"
        )
    return stored


def server_name(cluster: ClusterState, server: int | str, field: str | None = None) -> str:
    """Return the name of the server with this name or number; raises `UnknownNodeError` with that field.

    A number may be text, as from templates, forms and command-line options.
    """
    state = None
    if isinstance(server, str):
        state = cluster.by_name.get(server)
        if state is None and server.isascii() and server.isdecimal() and len(server) < 10:
            state = cluster.by_server_id.get(int(server))
    elif not isinstance(server, bool):
        state = cluster.by_server_id.get(server)
    if state is None:
        raise UnknownNodeError(server, len(cluster.nodes), field=field)
    return state.name


def is_repeat(cluster: ClusterState, request: Request) -> bool:
    """Return True if this very request holds a lease or is pending; another is a `DuplicateTaskError`."""
    lease = cluster.leases.get(request.lease_id)
    pending = cluster.pending.get(request.lease_id)
    if lease is None and pending is None:
        return False
    before = lease.request if lease is not None else pending.request  # type: ignore[union-attr]
    if before.owner != request.owner:
        raise DuplicateTaskError(
            request.lease_id, "belongs to another owner: use another task id", owner=before.owner
        )
    if before.shape != request.shape:
        verb = "holds" if lease is not None else "waits for"
        raise DuplicateTaskError(
            request.lease_id,
            f"already {verb} {allocator.describe(before)}; release it before asking for "
            f"{allocator.describe(request)}",
        )
    return True


def _utility(demand: Demand) -> Utility | None:
    if demand.utility is None:
        for name, value in (("target", demand.target), ("sensitivity", demand.sensitivity)):
            if value:
                raise InvalidRequestError(f"{name} needs utility as well", field="utility")
        return None
    if demand.target is None:
        raise InvalidRequestError("utility needs target as well", field="target")
    return Utility(demand.utility, demand.target, demand.sensitivity)
