"""Form of a whole demand: asked about, and held for a time."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

import pytest
from flask.testing import FlaskClient

from resource_manager import Demand, GPUResourceManager
from resource_manager.rest.tokens import Role

AsRole = Callable[..., FlaskClient]


def page(client: FlaskClient, **given: str) -> str:
    answer = client.get("/what-if", query_string=given)
    assert answer.status_code == 200
    return html.unescape(answer.get_data(as_text=True))


def hold(client: FlaskClient, text: str, **fields: str) -> tuple[int, str]:
    """Press *Hold* on the page, with these fields changed."""
    found = re.findall(
        r'<(?:input|button formmethod="post" formaction="[^"]*") name="(\w+)"[^>]* value="([^"]*)"', text
    )
    [path] = re.findall(r'formaction="(/act/hold[^"]*)"', text)
    answer = client.post(path, data={**dict(found), **fields}, follow_redirects=True)
    return answer.status_code, html.unescape(answer.get_data(as_text=True))


def test_the_form_has_every_field_of_a_demand(as_role: AsRole) -> None:
    named = set(re.findall(r'<(?:input|select) name="(\w+)"', page(as_role(Role.USER))))
    assert named - {"for"} == set(Demand.model_fields) - {"lease_id", "ttl"}


def test_a_part_of_a_gpu_that_nothing_enforces_is_said_before_it_is_taken(as_role: AsRole) -> None:
    text = page(as_role(Role.READER), gpus="1", gpu_milli="250")
    assert "Its part of the GPU is accounted, not enforced: no MPS daemon is kept on gpu-server-0." in text
    assert "Its part" not in page(as_role(Role.READER), gpus="2")


def test_the_form_and_its_errors_name_the_fields_in_words(as_role: AsRole) -> None:
    text = page(as_role(Role.USER), gpus="0.5")
    labels = re.findall(r"<label>([^<]+)<", text)
    assert labels[:4] == ["GPUs", "CPUs", "GPU fraction (‰)", "GPU types"]
    assert not any("_" in label for label in labels)
    assert "that GPU fraction is GPUs=1, GPU fraction (‰)=500" in text
    assert "In code: expected_runtime." in text
    assert '<small id="about-team">Team whose share of the cluster is charged.</small>' in text


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("nodes", "5", "Never:"),
        ("server", "gpu-server-2", "Yes, now on gpu-server-2"),
        ("labels_required", "zone=a", "Never:"),
        ("team", "vision", "Yes, now"),
        ("priority", "7", "Yes, now"),
        ("spread", "sideways", "Spread must be"),
        ("expected_runtime", "soon", "Expected runtime must be"),
    ],
)
def test_what_if_takes_the_whole_demand(as_role: AsRole, field: str, value: str, said: str) -> None:
    text = page(as_role(Role.READER), gpus="2", cpus="1", **{field: value})
    assert said in re.sub("<[^>]+>", "", text)
    assert "Hold" not in text, "a reader takes none"


def test_the_overview_leads_who_may_hold_gpus_to_the_form(as_role: AsRole) -> None:
    link = '<a href="/what-if">Hold…</a>'
    for path in ("/", "/fragments/side"):
        shown = {
            role: link in as_role(role).get(path).get_data(as_text=True) for role in (Role.READER, Role.USER)
        }
        assert shown == {Role.READER: False, Role.USER: True}, path


def test_the_servers_of_a_gang_say_whether_a_member_fits(as_role: AsRole) -> None:
    reader = as_role(Role.READER)
    assert ">A member of 3 fits</th>" in page(reader, gpus="2", cpus="1", nodes="3")
    assert ">Fits</th>" in page(reader, gpus="2", cpus="1")


def test_gpus_are_held_for_a_time_with_the_demand_that_was_asked_about(
    as_role: AsRole, manager: GPUResourceManager
) -> None:
    ursula = as_role(Role.USER, "ursula")
    text = page(ursula, gpus="2", cpus="3", server="gpu-server-1", team="vision")
    status, said = hold(ursula, text, **{"for": "30min"})
    assert (status, "is yours." in said) == (200, True), said
    [lease] = manager.leases()
    assert (lease["owner"], lease["team"], lease["server_name"]) == ("ursula", "vision", "gpu-server-1")
    assert lease["expires_at"] == pytest.approx(lease["granted_at"] + 1800, abs=1)
    hold(ursula, page(ursula), gpus="3")
    assert manager.leases()[1]["gpu_ids"] == [0, 1, 2], "what the form says, asked about or not"
    for _ in range(4):
        hold(ursula, page(ursula, gpus="8", cpus="1"))
    assert manager.queue()[0]["owner"] == "ursula"
    assert hold(ursula, text, **{"for": ""})[0] == 400


def test_a_form_that_is_sent_twice_takes_its_gpus_once(as_role: AsRole, manager: GPUResourceManager) -> None:
    """A double click, or a press more after a slow answer, took as many again, for the whole time."""
    ursula = as_role(Role.USER, "ursula")
    text = page(ursula)
    for _ in range(2):
        status, said = hold(ursula, text, gpus="4")
        assert (status, "is yours." in said) == (200, True), said
    assert len(manager.leases()) == 1
    assert hold(ursula, text, gpus="2")[0] == 400, "nor does another demand of that form take more"
    hold(ursula, page(ursula), gpus="4")
    assert len(manager.leases()) == 2, "the page that is loaded again has a form of its own"
    assert ursula.post("/act/hold?name=../other", data={"gpus": "1", "for": "1h"}).status_code == 400


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"for": "soon"}, "Hold for must be"),
        ({"priority": "high"}, "Priority must be"),
        ({"server": "gpu-server-9"}, "Server 'gpu-server-9' is not in the inventory"),
    ],
    ids=str,
)
def test_a_hold_that_is_refused_keeps_what_was_typed(
    as_role: AsRole, manager: GPUResourceManager, fields: dict[str, str], said: str
) -> None:
    ursula = as_role(Role.USER, "ursula")
    typed = {"team": "vision", "for": "2h", **fields}
    status, text = hold(ursula, page(ursula), **typed)
    assert (status, said in text, manager.leases()) == (400, True, []), text
    for name, value in typed.items():
        assert re.search(rf'<input name="{name}"[^>]* value="{value}"', text), name
    assert '<form method="get" action="/what-if"' in text


@pytest.mark.parametrize("holder", ["ursula", "Ursula K. Le Guin"])
def test_a_hold_is_shown_as_one_and_says_how_to_use_it(
    as_role: AsRole, manager: GPUResourceManager, holder: str
) -> None:
    ursula = as_role(Role.USER, holder)
    _, text = hold(ursula, page(ursula), **{"for": "1h", "preemptible": "true"})
    [lease] = manager.leases()
    assert lease["name"] == f"{holder}@console"
    seen_by_operator = as_role(Role.OPERATOR).get(f"/lease?id={lease['task_id']}").get_data(as_text=True)
    assert "It ends within 60 s, whatever uses its GPUs by then." in seen_by_operator
    assert f"gpu-manager attach {lease['short_id']}" in text
    assert lease["expected_runtime_s"] == 3600
    listed = html.unescape(ursula.get("/leases").get_data(as_text=True))
    for shown in (text, listed):
        assert ">HOLD</span>" in shown
        assert ("Stop job" in shown, "even if the job" in shown, "Release…" in shown) == (False, False, True)


def test_the_form_offers_what_the_cluster_has(as_role: AsRole, manager: GPUResourceManager) -> None:
    manager.submit("train", 2, team="<vision>")
    text = page(as_role(Role.USER))
    assert '<datalist id="known-team"><option><vision></option></datalist>' in text
    assert '<datalist id="known-server"><option>gpu-server-0</option>' in text
    assert re.search('<input name="server" list="known-server"', text)


def test_what_dags_will_ask_for_stands_below_the_queue(as_role: AsRole, manager: GPUResourceManager) -> None:
    client = as_role(Role.READER)
    assert "Coming" not in client.get("/queue").get_data(as_text=True)
    manager.announce("<b>", 4, copies=3)
    text = client.get("/queue").get_data(as_text=True)
    assert "at an unknown time 12 more GPUs will be asked for" in text
    assert ("&lt;b&gt;" in text, "<b>" in text) == (True, False)


def test_a_deadline_at_risk_is_said_in_queue_lease_and_what_if(
    as_role: AsRole, manager: GPUResourceManager
) -> None:
    for server in range(4):
        manager.allocate(f"nightly_{server}", 8, expected_runtime=7200)
    manager.submit("report", 8, expected_runtime=3600, deadline=5400)
    manager.check_deadlines()
    client = as_role(Role.READER)
    risk = re.compile(r"deadline in 1\.5 h, at risk: should end in 3\.\d h")
    assert risk.search(client.get("/queue").get_data(as_text=True))
    assert risk.search(client.get("/lease", query_string={"id": "report"}).get_data(as_text=True))
    assert risk.search(page(client, gpus="8", cpus="1", expected_runtime="1h", deadline="90min"))
