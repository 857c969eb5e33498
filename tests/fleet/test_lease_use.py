"""Use of GPUs by leases: idle leases, and the gauges that show them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from resource_manager.core.changes import AgentLost
from resource_manager.core.models import Node
from resource_manager.core.names import short_id
from resource_manager.core.teams import Team, Teams
from resource_manager.fleet.lease_use import idle_leases
from resource_manager.fleet.records import records_of
from resource_manager.fleet.server_use import use_of
from resource_manager.rest.assemble import persistence_of, standalone
from tests.agent.reporting import gpu, process, server, uuid
from tests.builders import redefine
from tests.fleet.test_receiving import Service


@pytest.fixture
def service() -> Service:
    return Service(server(), idle_after_s=60.0)


def idle(service: Service) -> dict[str, float]:
    uses = {name: record.leases for name, record in records_of(service.manager.store, ["gpu-a"]).items()}
    return service.manager.read(lambda cluster, now: idle_leases(cluster, uses, now))


def shown_idle(service: Service) -> list[tuple[bool, list[float | None]]]:
    [row] = use_of(service.manager)
    return [(gpu["idle"], [lease["idle_s"] for lease in gpu["leases"]]) for gpu in row["gpus"]]


def test_top_and_console_go_by_the_settings_too(service: Service) -> None:
    service.allocate("t", 1)
    for _ in range(7):
        assert shown_idle(service) == [(False, [None]), (False, [])]
        service.report(gpu(0), gpu(1))
    assert shown_idle(service) == [(True, [60.0]), (False, [])]
    service.manager.release_resources("t")
    service.report(gpu(0), gpu(1))
    assert shown_idle(service) == [(False, []), (False, [])]
    service.report(gpu(0), gpu(1))  # the report before found its GPUs clean
    assert records_of(service.manager.store, ["gpu-a"])["gpu-a"].leases == {}


def test_a_lease_is_idle_only_after_every_sample_of_the_time_was_below(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    running = process(lease_id="t", lease_source="environment")
    service.allocate("t", 2)
    for _ in range(6):
        service.report(gpu(0, utilization_percent=4, processes=[running]), gpu(1, processes=[running]))
    assert idle(service) == {}
    service.report(gpu(0, utilization_percent=80, processes=[running]), gpu(1, processes=[running]))
    for _ in range(7):
        assert idle(service) == {}
        service.report(gpu(0, utilization_percent=4, processes=[running]), gpu(1, processes=[running]))
    assert idle(service) == {"t": service.clock.now - 60}
    service.report(gpu(0, utilization_percent=4, processes=[running]), gpu(1, processes=[running]))
    assert caplog.text.count("lease t computes nothing on gpu-a for 60 s") == 1, "said once"


def test_a_task_says_itself_when_it_is_idle_and_what_is_unknown_is_not_idle(service: Service) -> None:
    service.allocate("patient", 1, idle_after=1000)
    service.allocate("modest", 1, idle_below=1)
    running = process(lease_id="modest", lease_source="environment")
    for _ in range(9):
        service.report(
            gpu(0, utilization_percent=None, processes=None),
            gpu(1, utilization_percent=2, processes=[running]),
        )
    assert idle(service) == {}
    for _ in range(8):
        service.report(gpu(0), gpu(1, utilization_percent=2))
    assert idle(service).keys() == {"modest"}, "no process of it is left"


def test_a_team_says_when_its_leases_are_idle_and_a_task_says_otherwise(service: Service) -> None:
    modest = Team("modest", idle_below=1.0, idle_after_s=30.0)
    redefine(service.manager, teams=Teams((modest, Team("plain"))))
    service.allocate("own", 1, team="modest", gpu_milli=500)
    service.allocate("asked", 1, team="modest", gpu_milli=500, idle_after=1000)
    for _ in range(5):
        service.report(gpu(0), gpu(1))
    assert idle(service).keys() == {"own"}
    service.manager.release_resources("own")
    service.manager.release_resources("asked")
    service.allocate("other", 1, team="plain")
    for _ in range(5):
        service.report(gpu(0), gpu(1))
    assert idle(service) == {}, "as the settings say"


def test_the_gauges_say_whose_a_gpu_is_and_what_it_does(service: Service, tmp_path: Path) -> None:
    kept = persistence_of(service.manager.settings, tmp_path / "tokens.json")
    app = standalone(service.manager, kept, open_to="loopback")
    try:
        service.allocate("t", 1, team="vision")
        service.report(
            gpu(0, utilization_percent=25, memory_used_mib=2), gpu(1, processes=[process()], rows_failed=True)
        )
        text = app.metrics.text().decode()
    finally:
        app.watch.close()
    found = dict(re.findall(r"^(gpu_manager_(?:gpu|server|report)_.*) ([\d.e+]+)$", text, re.MULTILINE))
    first = f'gpu="0",server="gpu-a",uuid="{uuid(0)}"'
    rogue = f'command="python mine.py",gpu="1",pid="77",server="gpu-a",user="eve",uuid="{uuid(1)}"'
    name = f"t {short_id(1)}"
    for wanted in (
        f'gpu_manager_gpu_info{{gpu="0",lease="{name}",server="gpu-a",team="vision",uuid="{uuid(0)}"}}',
        f'gpu_manager_gpu_info{{gpu="1",lease="",server="gpu-a",team="",uuid="{uuid(1)}"}}',
        f"gpu_manager_gpu_rogue_process{{{rogue}}}",
        f'gpu_manager_gpu_closed{{gpu="1",reason="row remap failed",server="gpu-a",uuid="{uuid(1)}"}}',
        'gpu_manager_server_watched{server="gpu-a"}',
    ):
        assert found[wanted] == "1.0", wanted
    assert found[f"gpu_manager_gpu_used_ratio{{{first}}}"] == "0.25"
    assert found[f"gpu_manager_gpu_memory_used_bytes{{{first}}}"] == "2.097152e+06"
    assert found['gpu_manager_report_age_seconds{server="gpu-a"}'] == "0.0"
    assert found['gpu_manager_report_interval_seconds{server="gpu-a"}'] == "10.0"
    closed = re.search(r'gpu_manager_gpus_closed\{gpu_type="A100",server="gpu-a"\} (\S+)', text)
    held = re.search(r'gpu_manager_gpus_allocated\{gpu_type="A100",server="gpu-a"\} (\S+)', text)
    assert closed
    assert held
    assert (closed[1], held[1]) == ("1.0", "1.0")
    assert found['gpu_manager_server_silent{server="gpu-a"}'] == "0.0"
    assert "gpu_manager_agents_silent_together 0.0" in text


def test_a_server_without_gpus_has_the_gauges_of_its_agent(tmp_path: Path) -> None:
    service = Service(server(), Node("cpu-a", 1, {"cpus": 64}))
    kept = persistence_of(service.manager.settings, tmp_path / "tokens.json")
    app = standalone(service.manager, kept, open_to="loopback")
    try:
        service.report(name="cpu-a")
        service.manager.commit(lambda cluster, now: [AgentLost("cpu-a", now, now - 60)])
        text = app.metrics.text().decode()
    finally:
        app.watch.close()
    for wanted in ("server_watched", "server_silent", "report_interval_seconds"):
        assert f'gpu_manager_{wanted}{{server="cpu-a"}} 1' in text


def test_gauges_say_which_server_is_silent_and_how_many_fell_silent_together(
    service: Service, tmp_path: Path
) -> None:
    kept = persistence_of(service.manager.settings, tmp_path / "tokens.json")
    app = standalone(service.manager, kept, open_to="loopback")
    service.receiver = app.receiver
    try:
        service.report(gpu(0), gpu(1))
        service.pass_time(80)
        held = app.metrics.text().decode()
        service.manager.commit(lambda cluster, now: [AgentLost("gpu-a", now, now - 60)])
        lost = app.metrics.text().decode()
    finally:
        app.watch.close()
    assert "gpu_manager_agents_silent_together 1.0" in held
    assert 'gpu_manager_server_silent{server="gpu-a"} 0.0' in held
    assert 'gpu_manager_server_silent{server="gpu-a"} 1.0' in lost
    assert 'gpu_manager_server_open{server="gpu-a"} 0.0' in lost
