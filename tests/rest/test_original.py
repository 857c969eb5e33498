"""`POST /api/allocate` as specified in the original design (section 7.2)."""

from __future__ import annotations

from flask.testing import FlaskClient

REQUEST = {"task_id": "test_001", "required_gpus": 4, "required_cpus": 32}


def test_an_allocation_has_the_original_keys(open_client: FlaskClient) -> None:
    response = open_client.post("/api/allocate", json=REQUEST)
    assert response.status_code == 200
    expected = {
        "server_id": 0,
        "server_name": "gpu-server-0",
        "gpu_ids": [0, 1, 2, 3],
        "cpu_count": 32,
        "gpu_devices": "0,1,2,3",
        "task_id": "test_001",
    }
    assert response.json is not None
    assert {key: response.json[key] for key in expected} == expected


def test_missing_parameters_are_400_with_the_original_text(open_client: FlaskClient) -> None:
    for body in ({}, {"task_id": "a"}, {**REQUEST, "required_cpus": None}):
        response = open_client.post("/api/allocate", json=body)
        assert response.status_code == 400
        assert response.json is not None
        assert response.json["error"] == "Missing required parameters"
        assert response.content_type == "application/problem+json"
    assert open_client.post("/api/allocate").json["error"] == "Missing required parameters"  # type: ignore[index]


def test_a_full_cluster_is_503_with_the_original_text(open_client: FlaskClient) -> None:
    for i in range(4):
        body = {"task_id": f"t{i}", "required_gpus": 8, "required_cpus": 64}
        assert open_client.post("/api/allocate", json=body).status_code == 200
    response = open_client.post("/api/allocate", json=REQUEST)
    assert response.status_code == 503
    assert response.json is not None
    assert response.json["error"] == "Resource allocation failed"


def test_out_of_range_is_400(open_client: FlaskClient) -> None:
    for change in ({"required_gpus": 1}, {"required_gpus": 9}, {"required_cpus": 0}, {"required_cpus": 65}):
        response = open_client.post("/api/allocate", json={**REQUEST, **change})
        assert response.status_code == 400, response.json
    assert open_client.get("/api/leases").json == {"items": [], "next": None}


def test_same_task_again_gets_the_same_lease(open_client: FlaskClient) -> None:
    first = open_client.post("/api/allocate", json=REQUEST).json
    assert open_client.post("/api/allocate", json=REQUEST).json == first
    assert open_client.post("/api/allocate", json={**REQUEST, "required_gpus": 2}).status_code == 409


def test_an_original_name_without_its_partner_is_a_missing_parameter(open_client: FlaskClient) -> None:
    for body in ({"required_gpus": 4}, {"required_cpus": 32}, {"cpus": 32}):
        response = open_client.post("/api/allocate", json={"task_id": "t", **body})
        assert (response.status_code, response.json["error"]) == (400, "Missing required parameters")  # type: ignore[index]
