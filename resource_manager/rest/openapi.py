"""OpenAPI document, generated from the routes, their pydantic models and return types."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter

from resource_manager import __version__
from resource_manager.rest.answers import Problem

if TYPE_CHECKING:
    from resource_manager.rest.routing import Route

REFERENCE = "#/components/schemas/{model}"


@functools.lru_cache(maxsize=4)  # the types of all routes take long
def document(routes: tuple[Route, ...], gpus: tuple[int, int], prefix: str = "") -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of all routes that are not pages.

    `gpus` is the least and the greatest number of whole GPUs that a task may request; `prefix` is the path
    at which the service is mounted. Cached by its arguments: not to be changed.
    """
    shown = [route for route in routes if not route.page]
    kinds = {Problem: None} | {kind: None for route in shown for kind in (_body(route), route.answer) if kind}
    schema_of, schemas = TypeAdapter.json_schemas(
        [(kind, "validation", TypeAdapter(kind)) for kind in kinds], ref_template=REFERENCE
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in shown:
        path = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", route.path)
        operation = paths.setdefault(path, {})[route.method.lower()] = _operation(route, schema_of)
        for parameter in operation["parameters"]:
            _set_range({parameter["name"]: parameter["schema"]}, gpus)
    for schema in schemas["$defs"].values():
        _set_range(schema.get("properties", {}), gpus)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "GPU resource manager",
            "version": __version__,
            "description": "Leases on named GPUs and CPUs. Errors are problem documents (RFC 9457).",
        },
        "servers": [{"url": prefix or "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    path_parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}}
        for name in re.findall(r"<int:(\w+)>", route.path)
    ]
    kind = "text/plain" if route.path == "/metrics" else "application/json"
    schema = {} if route.answer is None else schema_of[route.answer, "validation"]
    success = {"description": "Done.", "content": {kind: {"schema": schema}}}
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "description": f"Role: {route.role if route.role is not None else 'anyone'}.",
        "tags": [route.tag],
        "security": [] if route.role is None else [{"bearer": []}],
        "parameters": [*path_parameters, *_query_parameters(route)],
        "responses": {"200": success, **_failures(route)},
    }
    if route.takes_key:
        operation["parameters"].append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "description": "A request sent again with the same key and body within a day changes "
                "nothing; its answer shows what the first one led to, or is 409 if that has ended.",
                "schema": {"type": "string", "minLength": 1, "maxLength": 255},
            }
        )
    if (body := _body(route)) is not None:
        operation["requestBody"] = {
            "required": any(field.is_required() for field in body.model_fields.values()),
            "content": {"application/json": {"schema": {"$ref": REFERENCE.format(model=body.__name__)}}},
        }
    return operation


def _body(route: Route) -> type[BaseModel] | None:
    return route.body or route.described


def _set_range(properties: dict[str, Any], gpus: tuple[int, int]) -> None:
    """Set the range of `gpus` in these schemas; 1 is always in it, for a GPU fraction."""
    least, most = gpus
    for name in ("gpus", "required_gpus"):
        # that of a server in a cluster's file is no demand, and has no description
        if "description" in properties.get(name, {}) and properties[name].get("type") != "array":
            properties[name].update(minimum=min(least, 1), maximum=max(most, 1))
            properties[name]["description"] += f" From {least} to {most} on these servers."


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    schema = route.query.model_json_schema(ref_template=REFERENCE)
    required = schema.get("required", [])
    parameters = []
    for name, value in schema["properties"].items():
        nullable = [choice for choice in value.get("anyOf", []) if choice.get("type") != "null"]
        if nullable:  # in a query a parameter is left out, not null
            rest = {key: item for key, item in value.items() if key not in ("anyOf", "default")}
            value = {**rest, **(nullable[0] if len(nullable) == 1 else {"anyOf": nullable})}
        elif value.get("type") == "object":  # in a query, pairs repeat their key
            value = {
                "title": value["title"],
                "description": value["description"],
                "type": "array",
                "items": {"type": "string", "pattern": "^[^=]+="},
            }
        if model := value.pop("$ref", "").rpartition("/")[2]:  # the components have no models of queries
            value = {**schema["$defs"][model], **value}
        parameters.append({"name": name, "in": "query", "required": name in required, "schema": value})
    return parameters


def _failures(route: Route) -> dict[str, Any]:
    """Return the failures of every operation of this kind, and those declared by this one."""
    statuses = {*route.failures, 429, 503}
    if route.role is not None:
        statuses |= {401, 403}
    if route.query is not None or route.changes:
        statuses |= {400}
    if route.body is not None:
        statuses |= {400, 403, 409, 411, 413, 415, 422}
    problem = {"application/problem+json": {"schema": {"$ref": REFERENCE.format(model="Problem")}}}
    return {str(status): {"description": "A problem.", "content": problem} for status in sorted(statuses)}
