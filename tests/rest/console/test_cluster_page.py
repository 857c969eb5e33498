"""The page of the cluster, the banner on every page, and the route that applies sections."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import Persistence, standalone
from resource_manager.rest.tokens import Role
from resource_manager.settings import Settings

AsRole = Callable[..., FlaskClient]


def text_of(client: FlaskClient, path: str) -> str:
    """Return the page's text, without tags."""
    page = client.get(path).get_data(as_text=True)
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def test_the_page_shows_what_is_stored_and_who_changed_what(as_role: AsRole) -> None:
    olga = as_role(Role.OPERATOR, "olga")
    body = {"sections": {"cluster": {"order": "fifo"}, "teams": {"vision": {"guaranteed": 8}}}}
    answer = olga.put("/api/cluster", json=body)
    assert answer.get_json()["lines"] == [
        "~ order priority+backfill → fifo",
        "+ team vision, guaranteed 8",
    ], answer.get_data()
    page = text_of(as_role(Role.READER), "/cluster")
    assert 'order = "fifo"' in page.replace("&#34;", '"')
    assert "settings ~ order priority+backfill → fifo olga" in page
    assert "teams + team vision, guaranteed 8 olga" in page


def test_a_dry_run_changes_nothing_and_an_old_revision_is_a_conflict(
    as_role: AsRole, manager: GPUResourceManager
) -> None:
    olga = as_role(Role.OPERATOR)
    body = {"sections": {"cluster": {"order": "fifo"}}}
    told = olga.put("/api/cluster", json={**body, "dry_run": True}).get_json()
    assert (told["changed"], told["lines"]) == (True, ["~ order priority+backfill → fifo"])
    assert "fifo" not in olga.get("/api/cluster").get_json()["toml"]
    assert manager.history() == []
    old = told["revision"]
    olga.put("/api/cluster", json={"sections": {"cluster": {"order": "fair_share"}}})
    refused = olga.put("/api/cluster", json={**body, "revision": old})
    assert refused.status_code == 409
    assert "changed" in refused.get_json()["detail"]
    assert as_role(Role.USER).put("/api/cluster", json=body).status_code == 403


def test_every_page_says_that_the_file_differs_from_what_is_stored(kept: Persistence, tmp_path: Path) -> None:
    file = tmp_path / "servers.toml"
    file.write_text('[[servers]]\nname = "a"\ngpus = 1\ncpus = 1\n')
    settings = Settings(store="memory://", inventory=file)
    with GPUResourceManager(settings) as manager:
        service = standalone(manager, kept, open_to="loopback")
        page = text_of(create_app(service).test_client(), "/")
        service.watch.close()
    assert "servers.toml differs (5 lines): gpu-manager diff" in page


def test_a_store_without_a_cluster_says_what_to_do(kept: Persistence, tmp_path: Path) -> None:
    with GPUResourceManager.from_url(f"sqlite:///{tmp_path / 'state.db'}") as manager:
        service = standalone(manager, kept, open_to="loopback")
        client = create_app(service).test_client()
        assert "no servers yet: gpu-manager apply FILE" in text_of(client, "/")
        assert "There is no cluster yet: gpu-manager apply FILE" in text_of(client, "/cluster")
        refused = client.post("/api/allocate", json={"task_id": "t", "gpus": 1})
        service.watch.close()
    assert (refused.status_code, refused.get_json()["kind"]) == (503, "misconfigured")
