"""Ways around a team's limit: many owners, names that look alike, no team, another's team."""

from __future__ import annotations

import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.core.teams import Team, Teams
from resource_manager.rest import tokens
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role
from tests.builders import redefine

BODY = {"gpus": 4, "cpus": 1}


@pytest.fixture
def ada(manager: GPUResourceManager, service: Service, kept: Persistence) -> FlaskClient:
    """A user whose token is of the team vision, which may hold 4 GPUs."""
    redefine(manager, teams=Teams((Team("vision", limit=4), Team("nlp", guaranteed=16))))
    client = create_app(service).test_client()
    text = tokens.create(kept.tokens, "ada", Role.USER, teams=["vision"])
    client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {text}"
    assert client.post("/api/allocate", json={"task_id": "first", **BODY}).status_code == 200
    return client


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({}, 503),  # the team of the token
        ({"team": ""}, 503),
        ({"team": "vision"}, 503),
        ({"owner": "bob"}, 403),
        *[
            ({"team": team}, 403)
            for team in ("nlp", "Vision", "VISION", "visiоn", "vision ", " vision", "new")
        ],
    ],
)
def test_a_token_of_a_team_gets_no_more_than_the_limit(
    more: dict[str, str], status: int, ada: FlaskClient, manager: GPUResourceManager
) -> None:
    payload = {"task_id": "more", **BODY, **more}
    assert ada.post("/api/allocate", json=payload).status_code == status
    batch = ada.post("/api/allocate/batch", json={"requests": [payload]})
    assert batch.status_code == (200 if status == 503 else status)
    submitted = ada.post("/api/submit", json=payload)
    assert submitted.status_code == (200 if status == 503 else status)
    assert [lease["task_id"] for lease in manager.leases()] == ["first"]


def test_many_owners_of_a_team_share_its_limit(ada: FlaskClient, service: Service, kept: Persistence) -> None:
    client = create_app(service).test_client()
    for number in range(3):
        text = tokens.create(kept.tokens, f"owner-{number}", Role.USER, teams=["vision"])
        client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {text}"
        payload = {"task_id": f"t{number}", **BODY}
        assert client.post("/api/allocate", json=payload).status_code == 503
