"""Form of a whole `Demand`: what it would get now, and GPUs for a time."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args, get_origin

from resource_manager.core.cluster import ClusterState
from resource_manager.manager.arguments import ALIASES
from resource_manager.manager.demand import KINDS, Demand, from_texts
from resource_manager.rest.auth import Identity
from resource_manager.rest.problems import ProblemError
from resource_manager.rest.schemas import SubmitBody

FIRST = ("gpus", "cpus", "gpu_milli", "gpu_types", "nodes", "server", "team", "priority", "expected_runtime")
"""Fields that are shown without a click."""

OMITTED = ("lease_id", "ttl")

IN_CAPITALS = {"gpu": "GPU", "gpus": "GPUs", "cpus": "CPUs"}


def _label(name: str) -> str:
    first, *others = (IN_CAPITALS.get(word, word) for word in name.split("_"))
    return " ".join([first[0].upper() + first[1:], *others])


LABELS = {name: _label(name) for name in Demand.model_fields} | {
    "gpu_milli": "GPU fraction (‰)",
    "ttl": "Hold for",
}
"""Fields of a demand -> their names for people, as the form and its errors have them."""


@dataclass(frozen=True, slots=True)
class FormField:
    """Field of the form; `choices` are those of a list, else any text or number from `least` to `most`."""

    name: str
    label: str
    help: str
    is_number: bool
    choices: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None


@functools.cache
def fields() -> tuple[list[FormField], list[FormField]]:
    """Return the fields that come first, and the others."""
    schema = Demand.model_json_schema()["properties"]

    def field(name: str) -> FormField:
        kind, about = Demand.model_fields[name].annotation, schema[name]
        choices = get_args(kind) if get_origin(kind) is Literal else ("true", "false") if kind is bool else ()
        limits = about.get("minimum"), about.get("maximum")
        text = re.sub(r"\w+_\w+", lambda word: LABELS.get(word[0], word[0]), about["description"])
        return FormField(name, LABELS[name], text, KINDS[name] is int, choices, *limits)

    return (
        [field(name) for name in FIRST],
        [field(name) for name in Demand.model_fields if name not in (*FIRST, *OMITTED)],
    )


def given_in(form: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a demand that a form fills in, under their own names."""
    named = {ALIASES.get(name, name): value for name, value in form.items() if value}
    return {name: value for name, value in named.items() if name in KINDS and name not in OMITTED}


def known(cluster: ClusterState) -> dict[str, list[str]]:
    """Return by field what the cluster has of it: servers, teams and types of GPU."""
    teams = {team.name for team in cluster.teams.teams}
    teams |= {lease.request.team for lease in cluster.leases.values()}
    teams |= {entry.request.team for entry in cluster.pending.values()}
    servers = [state.name for state in cluster.nodes]
    types = {gpu.gpu_type for state in cluster.nodes for gpu in state.node.gpus}
    found = {"server": servers, "prefer_server": servers, "team": sorted(teams), "gpu_types": sorted(types)}
    return {name: [each for each in values if each] for name, values in found.items()}


def held_for(form: Mapping[str, str], caller: Identity, name: str) -> SubmitBody:
    """Return the demand of GPUs for the time `for` of a form, without a job; `name` is the form's own.

    Raises `ValueError` and `ProblemError`.
    """
    if not (length := form.get("for", "").strip()):
        raise ProblemError(400, "Hold for is missing: the time for which the GPUs are yours, such as 1h")
    lease_id = f"hand:{caller.name}@console/{name}"
    given = {**given_in(form), "lease_id": lease_id, "ttl": length}
    body = SubmitBody.model_validate(from_texts(given))
    return body.model_copy(update={"expected_runtime": body.ttl})
