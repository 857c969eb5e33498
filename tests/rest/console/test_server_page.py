"""Console with reports: bars in the cells of GPUs, marks on closed ones, and the page of one server."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.agent.report_format import read_report
from resource_manager.core.models import Gpu
from resource_manager.core.names import short_id
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.rest.console.history_pages import RecentChanges, health_history
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role
from tests.agent.reporting import as_text, gpu, process, report, server, uuid
from tests.builders import redefine

AsRole = Callable[..., FlaskClient]


@pytest.fixture
def manager() -> Iterator[GPUResourceManager]:
    with GPUResourceManager.from_url("memory://", inventory=[server(gpus=5)]) as manager:
        yield manager


@pytest.fixture
def reported(service: Service, manager: GPUResourceManager) -> None:
    """A lease on two GPUs, one of which is lost; a free one, one with a rogue process, and a missing one."""
    manager.submit("train", 2, owner="ada", team="vision")
    mine = process(78, user="ada", command="python <train>.py", lease_id="train", lease_source="environment")
    text = as_text(
        report(
            manager.store.now(),
            gpu(0, utilization_percent=71, memory_used_mib=63488, temperature_c=61, processes=[mine]),
            gpu(1, lost=True, utilization_percent=None, memory_used_mib=None, processes=None),
            gpu(2),
            gpu(3, utilization_percent=99, processes=[process(4242)]),
        )
    )
    service.receiver.receive(read_report(text))


def text_of(client: FlaskClient, path: str) -> str:
    response = client.get(path)
    assert response.status_code == 200
    return html.unescape(response.get_data(as_text=True))


@pytest.mark.usefixtures("reported")
@pytest.mark.parametrize("path", ["/", "/fragments/servers?ids=0"])
def test_cells_have_bars_and_closed_gpus_icon_and_pattern(as_role: AsRole, path: str) -> None:
    page = text_of(as_role(Role.READER), path)
    cells = re.findall(r'<[ai][^>]* class="cell ([^"]*)" title="([^"]*)"[^>]*><b><span>(.*?)</[ai]>', page)
    assert [(text.partition("<")[0], "fault" in classes) for classes, _, text in cells] == [
        ("train", False),
        ("✖ train", True),
        ("free", False),
        ("⚠ rogue", True),
        ("✖ closed", True),
    ]
    bars = [re.findall(r'<u class="(w\d+)">', text) for _, _, text in cells]
    assert bars == [["w8", "w8"], [], ["w0", "w0"], ["w10", "w0"], []]
    titles = [title for _, title, _ in cells]
    assert titles[0] == f"GPU 0: train {short_id(1)} (ada); 71 % used, 62 of 80 GB"
    assert titles[1].startswith(f"GPU 1: train {short_id(1)} (ada); closed: gpu lost; ")
    assert titles[3] == (
        "GPU 3: closed: rogue process; pid 4242 of eve: python mine.py; 99 % used, 0 of 80 GB"
    )
    assert titles[4] == f"GPU 4: closed: uuid missing; {uuid(4)}"


def test_without_reports_there_are_no_bars(as_role: AsRole) -> None:
    page = text_of(as_role(Role.READER), "/")
    assert "free" in page
    assert 'class="uses"' not in page


def test_a_server_that_leaves_while_its_page_is_made_is_not_found(
    as_role: AsRole, service: Service, manager: GPUResourceManager
) -> None:
    def look_and_leave(reader: Callable[..., Any]) -> Any:
        shown = look(reader)
        redefine(manager, nodes=[replace(server(gpus=5), name="another", server_id=7)])
        return shown

    look = service.watch.read
    object.__setattr__(service, "watch", Mock(wraps=service.watch, read=look_and_leave))
    assert as_role(Role.READER).get("/servers/0").status_code == 404


@pytest.mark.usefixtures("reported")
def test_the_page_of_a_server_has_gpus_processes_leases_and_history(as_role: AsRole) -> None:
    page = text_of(as_role(Role.READER), "/servers/0")
    for shown in (
        f'<small class="uuid">{uuid(0)}</small>',
        "71 %",
        "62 of 80 GB",
        "61 °C",
        '<td data-label="Process">78</td><td data-label="User">ada</td><td data-label="Memory">500 MiB</td>',
        '<strong class="bad">⚠ none (rogue)</strong>',
        "GPU 1 closed: gpu lost",
        "watched by its agent",
        "uuid missing",
    ):
        assert shown in page, shown
    assert "Resume GPU" not in page
    assert ">Action<" not in page
    raw = as_role(Role.READER).get("/servers/0").get_data(as_text=True)
    assert "python &lt;train&gt;.py" in raw
    assert as_role(Role.READER).get("/servers/7").status_code == 404


@pytest.mark.usefixtures("reported")
def test_an_operator_opens_a_gpu_from_the_page(as_role: AsRole, manager: GPUResourceManager) -> None:
    olga = as_role(Role.OPERATOR, "olga")
    page = text_of(olga, "/servers/0")
    [csrf] = set(re.findall(r'name="csrf_token" value="([^"]+)"', page))
    done = olga.post("/act/servers/resume", data={"csrf_token": csrf, "server": "gpu-a", "gpu": "3"})
    assert (done.status_code, done.headers["Location"]) == (303, "/servers/0")
    assert [each["gpu_id"] for each in manager.server(0)["gpus_closed"]] == [1, 4]
    assert "GPU 3 opened" in text_of(olga, "/servers/0")


@pytest.mark.usefixtures("reported")
def test_an_operator_drains_a_gpu_from_the_page(as_role: AsRole, manager: GPUResourceManager) -> None:
    olga = as_role(Role.OPERATOR, "olga")
    page = text_of(olga, "/servers/0")
    assert "Drain GPU 0" in page
    assert "Drain GPU 3" not in page, "it is closed"
    assert "GPU 3 takes new leases again." in page
    [csrf] = set(re.findall(r'name="csrf_token" value="([^"]+)"', page))
    form = {"csrf_token": csrf, "server": "gpu-a", "gpu": "0", "reason": "fans"}
    olga.post("/act/servers/drain", data=form)
    assert "GPU 0 of gpu-a takes no new leases." in text_of(olga, "/servers/0")
    page = text_of(as_role(Role.READER), "/servers/0")
    assert "GPU 0 closed: drained; fans, by olga" in page
    assert "<strong>closed</strong> drained; fans" in page


def test_a_button_acts_on_the_server_that_it_names_or_on_none(
    as_role: AsRole, manager: GPUResourceManager
) -> None:
    """Numbers count places in the file: once the first server has left, each is another server's."""
    servers = [{"name": name, "gpus": 8, "cpus": 8} for name in "abcd"]
    manager.apply(ClusterForm.model_validate({"servers": servers}))
    for name in "cd":
        manager.drain(name)
    olga = as_role(Role.OPERATOR, "olga")
    [(action, hidden)] = re.findall(
        r'id="resume-2".*?<form[^>]* action="([^"]+)">(.*?)<h2', text_of(olga, "/"), re.DOTALL
    )
    form = dict(re.findall(r'name="(\w+)" value="([^"]*)"', hidden))
    manager.apply(ClusterForm.model_validate({"servers": servers[1:]}))
    assert olga.post(action, data=form).status_code == 303
    assert [(each["server_name"], each["drained"]) for each in manager.servers()] == [
        *[("b", False), ("c", False), ("d", True)]
    ]
    manager.apply(ClusterForm.model_validate({"servers": servers[3:]}))
    gone = olga.post(action, data=form)
    assert (gone.status_code, "'c' is not in the inventory" in html.unescape(gone.text)) == (400, True)
    assert [each["drained"] for each in manager.servers()] == [True]


def test_a_gpu_that_an_operator_closed_is_no_alert_and_no_fault(
    as_role: AsRole, manager: GPUResourceManager
) -> None:
    manager.submit("train", 1)
    for gpu_id in (0, 4):
        manager.drain(0, gpu=gpu_id, reason="fans")
    page = text_of(as_role(Role.READER), "/")
    drained = r'class="cell ([^"]*)" title="GPU [04]: [^"]*closed: drained; fans"[^>]*><b><span>(\w+)'
    cells = re.findall(drained, page)
    assert [text for _, text in cells] == ["train", "closed"]
    assert not any("fault" in classes for classes, _ in cells)
    assert ("closing" in cells[0][0], cells[1][0]) == (True, "closed")
    assert 'class="alerts"' not in page


def test_a_gpu_that_is_being_cleaned_says_so(
    service: Service, manager: GPUResourceManager, as_role: AsRole
) -> None:
    text = as_text(report(manager.store.now(), *(gpu(number) for number in range(5))))
    service.receiver.receive(read_report(text))
    manager.submit("train", 1)
    manager.release("train")
    page = text_of(as_role(Role.READER), "/")
    name = f"train {short_id(1)}"
    assert f'title="GPU 0: being cleaned after {name}; 0 % used, 0 of 80 GB"' in page
    assert f"◌ being cleaned after {name}" in text_of(as_role(Role.READER), "/servers/0")


def test_the_use_of_some_servers_is_asked_for_by_name(as_role: AsRole) -> None:
    client = as_role(Role.READER)
    for query, names in (("", ["gpu-a"]), ("?servers=gpu-a&servers=no", ["gpu-a"]), ("?servers=no", [])):
        page = client.get(f"/api/gpus{query}").get_json()
        assert [row["server_name"] for row in page["items"]] == names
        assert page["next"] is None


@pytest.mark.usefixtures("reported")
def test_the_history_of_a_server_says_who_changed_it(as_role: AsRole, manager: GPUResourceManager) -> None:
    olga = as_role(Role.OPERATOR, "olga")
    olga.post("/api/servers/0/resume", json={"gpu": 3})
    olga.post("/api/servers/0/drain", json={"reason": "fans"})
    page = text_of(as_role(Role.READER), "/servers/0")
    for shown in ("GPU 3 opened, by olga", "drained: fans, by olga", "watched by its agent, by agent:gpu-a"):
        assert shown in page, shown


def test_the_history_of_a_server_goes_back_across_a_jump_of_versions() -> None:
    """A restart of the store, a restore and a reset let the version jump and keep the history."""
    drained: dict[str, Any] = {"version": 3, "change": "drained", "node": "gpu-a"}
    resumed: dict[str, Any] = {"version": 10**9, "change": "resumed", "node": "gpu-a"}

    def history(after: int, limit: int) -> list[Any]:
        return [change for change in (drained, resumed) if change["version"] > after][:limit]

    assert health_history(RecentChanges().newest(history, 10**9), "gpu-a") == [resumed, drained]


def test_a_bar_over_gpus_whose_numbers_have_gaps_says_each_number(
    as_role: AsRole, manager: GPUResourceManager
) -> None:
    gaps = replace(server(gpus=3), gpus=tuple(Gpu(number) for number in (0, 2, 5)))
    redefine(manager, nodes=[gaps])
    manager.submit("wide", 3)
    page = text_of(as_role(Role.READER), "/")
    [title] = re.findall(r'title="(GPU[^"]*wide[^"]*)"', page)
    assert title.startswith("GPU 0, 2, 5: wide ")
    assert "· GPU 0, 2, 5 ·" in page
