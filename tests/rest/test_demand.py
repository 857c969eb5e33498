"""Requests under the current and the original design's names, and the errors of invalid ones."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.core.models import Gpu, Node
from tests.builders import redefine


def test_a_request_under_the_current_names(open_client: FlaskClient) -> None:
    payload = {"task_id": "t", "gpus": 2, "prefer_server": "gpu-server-2"}
    lease = open_client.post("/api/allocate", json=payload).get_json()
    assert (lease["server_id"], lease["cpu_count"]) == (2, 1)
    same = {"task_id": "t", "required_gpus": 2, "required_cpus": 1, "prefer_server_id": 2, "gpus": 2}
    assert open_client.post("/api/allocate", json=same).get_json()["task_id"] == "t"
    payload = {"task_id": "u", "gpus": 1, "gpu_milli": 500, "cpus": 3, "server": 3}
    answer = open_client.post("/api/allocate/batch", json={"requests": [payload]}).get_json()
    assert answer["results"][0]["server_id"] == 3
    assert open_client.post("/api/submit", json=payload).get_json()["cpu_count"] == 3
    query = {"gpus": 2, "server": "1", "prefer_server": "gpu-server-0"}
    assert open_client.get("/api/explain", query_string=query).get_json()["server_name"] == "gpu-server-1"


BUILT_IN = "(the inventory is the built-in one)"
ADVICE = "that GPU fraction is"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"gpus": 9}, f"gpus must be between 2 and 8 {BUILT_IN}, got 9"),
    ({"required_gpus": 9, "required_cpus": 1}, f"required_gpus must be between 2 and 8 {BUILT_IN}, got 9"),
    ({"gpus": 2, "cpus": 65}, "cpus must be between 1 and 64 (what the largest server has), got 65"),
    ({"required_gpus": 2, "required_cpus": 65}, "required_cpus must be between 1 and 64 (what the"),
    ({"gpus": 0.5}, f"gpus must be a whole number, got 0.5; {ADVICE} gpus=1, gpu_milli=500"),
    (
        {"required_gpus": "0.25"},
        f"required_gpus must be a whole number, got '0.25'; {ADVICE} required_gpus=1",
    ),
    ({"required_gpus": "many"}, "required_gpus must be a whole number, got 'many'"),
    ({"gpus": 2, "required_gpus": 4}, "gpus is 2, and required_gpus is 4: give one of them"),
    ({"gpus": 2, "cpus": 1, "required_cpus": 2}, "cpus is 1, and required_cpus is 2: give one of them"),
    (
        {"gpus": 2, "prefer_server": 1, "prefer_server_id": 2},
        "prefer_server is 1, and prefer_server_id is 2",
    ),
    ({"gpus": 2, "gpu_milli": 500}, "gpu_milli=500 goes with gpus=1, got gpus=2"),
    ({"gpus": 2, "utility": 5}, "utility needs target as well"),
    ({"gpus": 2, "utility": True, "target": 9}, "utility must be a number, got True"),
    ({"gpus": 2, "idle_below": True}, "idle_below must be a number, got True"),
    ({"gpus": 2, "server": "nowhere"}, "server 'nowhere' is not in the inventory of 4 servers"),
    ({"gpus": 2, "prefer_server": 77}, "prefer_server 77 is not in the inventory of 4 servers"),
    ({"gpus": 2, "prefer_server_id": 77}, "prefer_server_id 77 is not in the inventory of 4 servers"),
]


@pytest.mark.parametrize(("body", "detail"), WRONG)
def test_an_invalid_request_is_reported_under_the_names_it_used(
    open_client: FlaskClient, body: dict[str, Any], detail: str
) -> None:
    payload = {"task_id": "t", **body}
    for path in ("/api/allocate", "/api/submit"):
        problem = open_client.post(path, json=payload)
        assert (problem.status_code, problem.get_json()["detail"][: len(detail)]) == (400, detail)
    problem = open_client.post("/api/allocate/batch", json={"requests": [payload]})
    assert (problem.status_code, detail in problem.get_json()["detail"]) == (400, True)


def test_a_part_of_a_gpu_alone_means_one_gpu(open_client: FlaskClient) -> None:
    part = {"gpu_milli": 500, "server": 3}
    lease = open_client.post("/api/submit", json={"task_id": "t", **part}).get_json()
    assert (lease["gpu_milli"], lease["gpu_ids"]) == (500, [0])
    assert open_client.get("/api/explain", query_string=part).get_json()["gpu_ids"] == [0]


def test_an_invalid_query_is_reported_under_the_names_it_used(open_client: FlaskClient) -> None:
    for query, words in (
        ("gpus=9", "gpus must be between 2 and 8"),
        ("required_gpus=9&required_cpus=1", "required_gpus must be between 2 and 8"),
        ("gpus=0.5", f"gpus must be a whole number, got '0.5'; {ADVICE} gpus=1, gpu_milli=500"),
        ("gpus=2&server=77", "server '77' is not in the inventory of 4 servers"),
        ("cpus=2", "missing: gpus"),
        ("required_gpus=2", "missing: required_cpus"),
        ("gpus=2&cpus=²", "cpus must be a whole number, got '²'"),
    ):
        problem = open_client.get(f"/api/explain?{query}")
        assert (problem.status_code, problem.get_json()["detail"][: len(words)]) == (400, words)


def test_the_stored_inventory_sets_the_range_of_gpus(
    open_client: FlaskClient, manager: GPUResourceManager
) -> None:
    def told() -> tuple[str, str]:
        described = open_client.get("/openapi.json").get_json()
        gpus = described["components"]["schemas"]["AllocateBody"]["properties"]["gpus"]
        query = {
            parameter["name"]: parameter["schema"]
            for parameter in described["paths"]["/api/explain"]["get"]["parameters"]
        }
        assert (query["gpus"]["minimum"], query["gpus"]["maximum"]) == (gpus["minimum"], gpus["maximum"])
        page = open_client.get("/what-if").get_data(as_text=True)
        field = page[page.index('name="gpus"') :].partition(">")[0]
        return f"{gpus['description']} {gpus['minimum']} {gpus['maximum']}", field

    text, field = told()
    assert text.endswith("From 2 to 8 on these servers. 1 8")
    assert 'min="1" max="8"' in field
    redefine(manager, nodes=[Node("a", 0, {"cpus": 8}, tuple(Gpu(i) for i in range(4)))])
    text, field = told()
    assert text.endswith("From 1 to 4 on these servers. 1 4")
    assert 'max="4" required value="1"' in field
    assert open_client.post("/api/allocate", json={"task_id": "t", "gpus": 1}).status_code == 200


def test_the_what_if_form_reports_errors_under_its_own_names(open_client: FlaskClient) -> None:
    page = open_client.get("/what-if?gpus=2&cpus=4").get_data(as_text=True)
    assert "<strong>Yes, now</strong>" in page
    page = open_client.get("/what-if?gpus=0.5&cpus=4").get_data(as_text=True)
    assert "GPU fraction (‰)=500" in page
    assert "GPUs must be between 2 and 8" in open_client.get("/what-if?gpus=9&cpus=4").get_data(as_text=True)
