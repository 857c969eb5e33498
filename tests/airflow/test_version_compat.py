"""Before Airflow 3.2 every thread of a trigger has to ask Airflow in the event loop of the trigger."""

import asyncio
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from asgiref.sync import async_to_sync

    from resource_manager.airflow import version_compat
    from resource_manager.airflow.task_trigger import place_watch

from resource_manager.core.models import JobPlace
from resource_manager.jobs.gang_job import GangJob
from resource_manager.jobs.launchers import LauncherError
from resource_manager.jobs.launchers.registry import SIGNALS
from tests.jobs.gangs import gang_allocation


@pytest.fixture
def asks(monkeypatch):
    """Return a function that asks as such an Airflow does and then fails, and the loops that it asked in."""
    monkeypatch.setattr(version_compat, "THREADS_MAY_ASK", False)
    loops = []

    async def answer():
        loops.append(asyncio.get_running_loop())

    def ask(_):
        async_to_sync(answer)()
        raise LauncherError("no such server")

    return ask, loops


def test_the_members_of_a_gang_ask_in_the_loop_of_the_trigger(launch_by, asks):
    ask, loops = asks
    launch_by(ask)
    gang = GangJob.planned(gang_allocation(), "ssh", "servers")

    async def run():
        await version_compat.in_thread(gang.stop)
        return asyncio.get_running_loop()

    loop = asyncio.run(run())
    assert loops
    assert set(loops) == {loop}


def test_the_standing_look_at_a_place_asks_in_the_loop_of_the_trigger(monkeypatch, asks):
    ask, loops = asks
    monkeypatch.setitem(SIGNALS, "ssh", ask)

    async def run():
        changed = asyncio.Event()
        place = JobPlace("ssh", "gpu-0", "servers", machine="m")
        with place_watch.PlaceWatch.of(place).watching("key", changed):
            await asyncio.wait_for(changed.wait(), 20)
        return asyncio.get_running_loop()

    assert loops == [asyncio.run(run())]
