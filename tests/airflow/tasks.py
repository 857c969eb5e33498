"""Task instance under test, its deferrals, and the events of triggers."""

import asyncio
import warnings
from contextlib import suppress
from dataclasses import asdict
from inspect import iscoroutinefunction
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    try:  # since 3.2
        from airflow.sdk.exceptions import TaskDeferred
    except ImportError:
        from airflow.exceptions import TaskDeferred  # type: ignore[no-redef]

from resource_manager.jobs.task_identity import TaskIdentity

TASK = TaskIdentity("test", "d", "r", "t")


def context_of(identity=TASK, **more):
    """Return the context in which Airflow calls an operator, as far as ours read it."""
    own = {
        "try_number": 1,
        "id": "a",
        "max_tries": 0,
        "xcom_push": lambda **_: None,
        **asdict(identity),
        **more,
    }
    return {"ti": SimpleNamespace(**own)}


def deferral(call):
    """Return the deferral of a step that leaves its worker."""
    with pytest.raises(TaskDeferred) as deferred:
        call()
    return deferred.value


def asked(operator, **context):
    """Return the trigger of a task that has asked for GPUs."""
    left = deferral(lambda: operator.execute(context_of(**context)))
    assert left.method_name == "execute_ended"
    return left.trigger


def again(trigger, **plan):
    """Return the trigger as another triggerer starts it, with these values of its plan instead."""
    path, arguments = trigger.serialize()
    assert path == f"{type(trigger).__module__}.{type(trigger).__name__}"
    if plan:
        arguments = {**arguments, "plan": {**arguments["plan"], **plan}}
    return type(trigger)(**arguments)


def fire(trigger, meanwhile=lambda: None):
    """Return the payload of the trigger's first event, without the fencing token of a job's end."""

    async def act():
        await asyncio.sleep(0.1)
        await asyncio.to_thread(meanwhile)

    async def run():
        acting = asyncio.ensure_future(act())
        try:
            event = await anext(trigger.run())
            await acting
            return event.payload
        finally:
            await trigger.cleanup()

    payload = asyncio.run(asyncio.wait_for(run(), 30))
    payload.pop("fencing_token", None)
    payload.pop("waited_s", None)
    return payload


def until(trigger, condition):
    """Run the trigger until the condition holds; then cancel it, as a triggerer that shuts down does."""

    async def run():
        watching = asyncio.ensure_future(anext(trigger.run()))
        while not condition():
            await asyncio.sleep(0.02)
            if watching.done():
                raise AssertionError(f"it fired {watching.result()}")
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        await trigger.cleanup()

    asyncio.run(asyncio.wait_for(run(), 30))


def ended(operator, **context):
    """Live one try of a training to its end; return what its task returns."""
    event = fire(asked(operator, **context))
    return operator.execute_ended(context_of(**context), event)


def interrupted(monkeypatch, place, name, when, act, wait):
    """Have `act` done at the first call of a function only, or awaited `wait` if it is asynchronous."""
    calls = [True]
    function = getattr(place, name)

    def is_first():
        return bool(calls) and calls.pop()

    def sync(*given, **more):
        first = is_first()
        if first and when == "before":
            act()
        answer = function(*given, **more)
        if first and when == "after":
            act()
        return answer

    async def asynchronous(*given, **more):
        if is_first():
            await wait()
        return await function(*given, **more)

    monkeypatch.setattr(place, name, asynchronous if iscoroutinefunction(function) else sync)
