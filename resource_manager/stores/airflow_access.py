"""Two ways to an Airflow Variable: the execution API inside a task, the database elsewhere.

`Variable.get` answers "not found" also when Airflow's API server or database is out, which here would
look like a state that was never written. Both ways below tell the two apart, but for one case: an API
server that runs while its database is out answers a task "not found". That one the store tells by the
version that Redis remembers.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from resource_manager.errors import CorruptStateError, SettingsError
from resource_manager.extras import how_to_install
from resource_manager.outage import outage

if TYPE_CHECKING:
    from collections.abc import Iterator

DESCRIPTION = "State of the GPU resource manager, written by it alone; see its command gpu-manager."


class VariableAccess(Protocol):
    """One Airflow Variable's text."""

    def get(self, key: str) -> str | None:
        """The text, or None if there is no such Variable; raises `StoreUnavailableError`."""

    def set(self, key: str, text: str, before: str | None) -> bool:
        """Writes the text where `before` (None: nothing) still is; False, changing nothing, if it is not.

        Only the way to the database can tell; the other writes whatever is there. After
        `StoreUnavailableError` the text may have been written or not.
        """


def variable_access() -> VariableAccess:
    """The way that works in this process; raises `SettingsError` if there is no Airflow here."""
    if find_spec("airflow") is None:
        raise SettingsError(
            "an airflow:// store needs Apache Airflow; set GPU_MANAGER_STORE to a redis:// URL, or "
            f"{how_to_install('airflow')}"
        )
    return CurrentAccess()


class CurrentAccess:
    """Looks at each call whether this process is a task (or trigger) by now, as Airflow itself does."""

    def get(self, key: str) -> str | None:
        return self._way().get(key)

    def set(self, key: str, text: str, before: str | None) -> bool:
        return self._way().set(key, text, before)

    def _way(self) -> VariableAccess:
        supervised = hasattr(sys.modules.get("airflow.sdk.execution_time.task_runner"), "SUPERVISOR_COMMS")
        return TaskAccess() if supervised else DatabaseAccess()


class TaskAccess:
    """Through the task's supervisor to the execution API."""

    def get(self, key: str) -> str | None:
        from airflow.sdk.exceptions import ErrorType
        from airflow.sdk.execution_time.comms import ErrorResponse, GetVariable, VariableResult

        answer = self._send(GetVariable(key=key), key)
        if isinstance(answer, VariableResult):
            return answer.value
        if isinstance(answer, ErrorResponse) and answer.error == ErrorType.VARIABLE_NOT_FOUND:
            return None
        raise outage(f"Airflow Variable {key!r}: the execution API answered {answer!r}")

    def set(self, key: str, text: str, before: str | None) -> bool:
        from airflow.sdk.execution_time.comms import ErrorResponse, PutVariable

        answer = self._send(PutVariable(key=key, value=text, description=DESCRIPTION), key)
        if isinstance(answer, ErrorResponse):
            raise outage(f"Airflow Variable {key!r}: the execution API answered {answer!r}")
        return True

    def _send(self, message: Any, key: str) -> Any:
        from airflow.sdk.execution_time import task_runner

        with _reporting(key, "execution API"):
            return task_runner.SUPERVISOR_COMMS.send(message)


class DatabaseAccess:
    """Through the model to Airflow's database: API server, scheduler, commands."""

    def get(self, key: str) -> str | None:
        with _reporting(key, "database"):
            from airflow.models.variable import Variable
            from airflow.utils.session import create_session
            from sqlalchemy import select

            with create_session() as session:
                row = session.scalar(select(Variable).where(Variable.key == key))
                if row is None:
                    return None
                text: str | None = row.get_val()
        if text is None:
            raise CorruptStateError(
                f"Airflow Variable {key!r} cannot be decrypted: is AIRFLOW__CORE__FERNET_KEY the right one?"
            )
        return text

    def set(self, key: str, text: str, before: str | None, description: str = DESCRIPTION) -> bool:
        with _reporting(key, "database"):
            from airflow.models.variable import Variable
            from airflow.utils.session import create_session
            from sqlalchemy import select
            from sqlalchemy.exc import IntegrityError

            with suppress(IntegrityError), create_session() as session:
                # The row stays locked until the commit: nobody writes between the comparison and this.
                row = session.scalar(select(Variable).where(Variable.key == key).with_for_update())
                if (None if row is None else row.get_val()) != before:
                    return False
                if row is None:
                    session.add(Variable(key=key, val=text, description=description))
                else:
                    Variable.set(key, text, description=description, session=session)
                return True
            return False  # somebody else was the first to make it


@contextmanager
def _reporting(key: str, way: str) -> Iterator[None]:
    """Airflow raises many kinds of errors for an outage; all mean that the Variable was not reached."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise outage(f"Airflow Variable {key!r} cannot be reached through the {way}: {reason}") from error
