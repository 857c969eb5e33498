"""Marks of leases that are being preempted, and of maintenance: on the pages and in the metrics."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Callable

import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.core.maintenance import as_text
from resource_manager.core.teams import Teams
from resource_manager.manager.answer_words import name_in_words
from resource_manager.manager.maintenance_windows import WindowForm
from resource_manager.rest.tokens import Role
from tests.builders import redefine

AsRole = Callable[..., FlaskClient]


@pytest.fixture
def read(as_role: AsRole) -> Callable[[str], str]:
    client = as_role(Role.READER)
    return lambda path: html.unescape(client.get(path).get_data(as_text=True))


@pytest.mark.parametrize("preempt", [False, True])
def test_what_runs_under_maintenance_is_marked(
    preempt: bool, manager: GPUResourceManager, read: Callable[[str], str]
) -> None:
    redefine(manager, teams=Teams(preemption=True))
    before = read("/metrics")
    assert "gpu_manager_leases_under_maintenance 0.0" in before
    name = name_in_words(manager.submit("train", 2, 1, prefer_server="gpu-server-0"))
    begin = time.time() - 60.0
    window = WindowForm.of(
        **{"from": as_text(begin)}, servers=["gpu-server-0"], until=as_text(begin + 3600.0), preempt=preempt
    )
    assert manager.add_maintenance(window)["running"] == ["train"]
    manager.expire_and_schedule()
    overview = read("/")
    assert re.search(r"under maintenance, ends <time [^>]*>in (59|60) min</time>", overview)
    assert f"⚠ {name} on gpu-server-0 still runs under maintenance" in overview
    metrics = read("/metrics")
    assert "gpu_manager_leases_under_maintenance 1.0" in metrics
    assert f'gpu_manager_leases_preempting{{stuck="false"}} {preempt:d}.0' in metrics
    assert f'gpu_manager_preemptions_total{{reason="maintenance"}} {preempt:d}.0' in metrics
    assert ("PREEMPTING" in read("/leases")) == preempt
    assert ("⇤ train" in overview) == preempt
    assert (
        bool(re.search("It is preempted for maintenance [0-9]+: its job has", read("/lease?id=train")))
        == preempt
    )
    assert "under maintenance" in read("/servers/0")


def test_a_preemption_that_an_operator_asks_for_is_counted_as_theirs(
    manager: GPUResourceManager, read: Callable[[str], str]
) -> None:
    """It takes nobody's guarantee, and no priority decides it."""
    for number in range(4):
        manager.submit(f"held-{number}", 8)
    manager.submit("waits", 8)
    manager.preempt("held-0", preemptor="waits")
    metrics = read("/metrics")
    assert 'gpu_manager_preemptions_total{reason="operator"} 1.0' in metrics
    assert 'gpu_manager_preemptions_total{reason="priority"} 0.0' in metrics
