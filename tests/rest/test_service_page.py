"""Roles and limits on the page of the service, compared with the code."""

from __future__ import annotations

import re
from pathlib import Path

from resource_manager.rest import api
from resource_manager.rest.console import pages
from resource_manager.rest.openapi import document
from resource_manager.rest.tokens import Role
from resource_manager.storage.airflow_variable.store import KEYS_KEPT
from resource_manager.storage.once import KEEP_S, MAX_KEYS

PAGE = Path(__file__).parents[2] / "docs" / "service.md"


def role_table() -> list[str]:
    rows = []
    for route in [*api.routes.all, *pages.routes.all]:
        path = re.sub(r"<(?:int:)?(\w+)>", r"<id>", route.path)
        may = ["yes" if route.role is None else ""]
        may += ["yes" if route.role is None or role.includes(route.role) else "" for role in Role]
        rows.append(f"| `{route.method} {path}` | {' | '.join(may)} |".replace("  ", " "))
    return rows


def test_the_documented_roles_equal_the_declared_ones() -> None:
    text = PAGE.read_text(encoding="utf-8")
    written = re.search(r"<!-- roles.*?-->\n(.*?)<!-- /roles -->", text, re.DOTALL)
    assert written is not None
    assert written[1].strip().splitlines()[2:] == role_table()


def test_each_operation_has_a_summary() -> None:
    assert all(route.summary for route in api.routes.all)


def test_the_documented_limits_of_idempotency_keys_are_those_of_the_stores() -> None:
    [line] = [each for each in PAGE.read_text().splitlines() if each.startswith("- **`Idempotency-Key`**")]
    assert "the same key and body within a day is not made again" in line
    assert KEEP_S == 86_400
    said = f"about {MAX_KEYS:,} keys, in an `airflow://` store all callers together {KEYS_KEPT:,};"
    assert said in line


def test_the_document_of_the_interface_is_made_once() -> None:
    """Any reader can ask for it, and the types of all routes take long."""
    first, again = (document(tuple(api.routes.all), (1, 8)) for _ in range(2))
    assert again is first


def test_what_the_document_refers_to_is_in_it() -> None:
    described = document(tuple(api.routes.all), (1, 8))
    models = set(re.findall(r"'#/components/schemas/(\w+)'", str(described)))
    assert models <= described["components"]["schemas"].keys()
    parameters = described["paths"]["/api/history"]["get"]["parameters"]
    [what] = [each["schema"] for each in parameters if each["name"] == "what"]
    assert {"release", "drain"} <= set(what["enum"])


def test_the_document_describes_the_body_of_every_change_that_has_one() -> None:
    described = document(tuple(api.routes.all), (1, 8))
    without = {
        path
        for path, methods in described["paths"].items()
        if "requestBody" not in methods.get("post", methods.get("put", {"requestBody": None}))
    }
    assert without == {"/api/login"}
    body = described["paths"]["/api/reports"]["post"]["requestBody"]
    name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert {"format", "server", "gpus"} <= set(described["components"]["schemas"][name]["required"])
