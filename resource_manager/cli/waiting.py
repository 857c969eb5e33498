"""Waiting for a lease in a terminal: its place in the queue is given back where the wait ends without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from resource_manager.cli.base import REFUSED, Failure
from resource_manager.cli.lazy_tables import tables
from resource_manager.cli.session import Session, say
from resource_manager.core.changes import Outcome
from resource_manager.core.names import display_name
from resource_manager.errors import DuplicateTaskError, ResourceManagerError, StateLostError, is_outage
from resource_manager.manager.answer_words import name_in_words

if TYPE_CHECKING:
    from resource_manager.cli.target import Target
    from resource_manager.manager.lease_service import LeaseService

TELL_EVERY_S = 5.0
"""Time after which a change of the place in the queue is told; a grant is told at once."""

ASK_AGAIN_S = 1.0
"""Pause after a call that nobody answered."""


def wait_for_grant(session: Session, demand: Any) -> Any:
    """Return the lease once it is granted; a wait is told again when its place or kind of reason changes.

    At a signal or an error the request leaves the queue, or the lease ends; what had its id before stays.
    """
    lease_id, said = demand.lease_id, None
    is_own = session.ask(partial(_is_own, demand=demand))  # out of reach: there is nothing to give back
    asked = session.begin(lambda manager: manager.submit(demand))
    try:
        found = session.signals.result(asked)
        while found["state"] == "WAITING":
            if said != (said := (found["kind"], found["position"])):
                say(f"{name_in_words(found)} {_wait_of(found)}")
            try:
                found = session.wait_for(lambda manager: manager.wait(lease_id, TELL_EVERY_S)) or session.ask(
                    partial(_ask_again, demand=demand)
                )
            except ResourceManagerError as error:
                if not is_outage(error):
                    raise
                found = {**found, "kind": "unreachable", "reason": f"{error}; it goes on to wait"}
                session.signals.pause(ASK_AGAIN_S)
        session.signals.check()
    except (StateLostError, DuplicateTaskError):  # it is gone, too, or was never made
        raise
    except BaseException as error:
        was_refused = asked.done() and asked.exception() is error and not is_outage(error)
        if is_own and (session.signals.first or not was_refused):
            session.give_back(lease_id, partial(_give_back, lease_id=lease_id, submitted=asked))
        raise
    return found


def hold_once_granted(target: Target, demand: Any, tell: Callable[[Any], object]) -> None:
    """Wait for the grant, and tell of a lease that then stays; a signal while it is told comes too late."""
    with Session(target) as session:
        tell(wait_for_grant(session, demand))


def _wait_of(entry: Mapping[str, Any]) -> str:
    start = entry.get("estimated_start")
    expected = f"; expected start {tables.start(start)}" if start else ""
    return f"waits at position {entry['position']}: {entry['reason']}{expected}"


def _ask_again(manager: LeaseService, *, demand: Any) -> Any:
    """Submit a request that is gone again, if nobody ended it: it was lost with a state that was set back."""
    from resource_manager.manager.recorded_changes import ended_by_others  # loads pydantic

    if who := ended_by_others(manager, demand.lease_id):
        raise Failure(f"{display_name(demand.lease_id, {})} waits no more: {who}", REFUSED)
    return manager.submit(demand)


def _is_own(manager: LeaseService, *, demand: Any) -> bool:
    """Return whether nothing has the id of a demand that is about to be made, or its own request."""
    before = manager.status_of(demand.lease_id)
    return before is None or (
        before["state"] == "WAITING" and before["owner"] == (demand.owner or manager.caller_name())
    )


def _give_back(manager: LeaseService, *, lease_id: str, submitted: Future[Any]) -> None:
    """Take the request out of the queue, or end the lease that it has become; not if it was refused."""
    if isinstance(submitted.exception(), DuplicateTaskError):
        return
    if not manager.cancel(lease_id):
        manager.release(lease_id, outcome=Outcome.CANCELLED)
