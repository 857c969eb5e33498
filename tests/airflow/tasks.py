"""Task instance under test, and the event of a trigger."""

import asyncio
from dataclasses import asdict
from types import SimpleNamespace

from resource_manager.jobs.task_identity import TaskIdentity

TASK = TaskIdentity("test", "d", "r", "t")


def context_of(identity=TASK, **more):
    """Return the context in which Airflow calls an operator, as far as ours read it."""
    own = {"try_number": 1, "xcom_push": lambda **_: None, **asdict(identity), **more}
    return {"ti": SimpleNamespace(**own)}


def fire(trigger, meanwhile=lambda: None):
    """Return the payload of the trigger's first event, without the fencing token that a job's end has."""

    async def run():
        asyncio.get_running_loop().call_later(0.1, meanwhile)
        return (await anext(trigger.run())).payload

    payload = asyncio.run(asyncio.wait_for(run(), 30))
    assert payload.pop("fencing_token", 1) >= 1
    return payload
