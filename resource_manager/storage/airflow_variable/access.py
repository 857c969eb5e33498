"""Access to an Airflow Variable: through the execution API inside a task, through the database elsewhere.

`Variable.get` also answers "not found" when Airflow's API server or database is down; a store would take
that for a state that was never written. Both classes below distinguish the two, except in one case: an API
server that runs while its database is down answers a task "not found". The store detects that case by the
version kept in Redis.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, Protocol

from resource_manager.errors import CorruptStateError, SettingsError, how_to_install
from resource_manager.storage.outage import outage

DESCRIPTION = "State of the GPU resource manager, written by it alone; see its command gpu-manager."


class VariableAccess(Protocol):
    """Access to the text of an Airflow Variable."""

    def get(self, key: str) -> str | None:
        """Return the text, or None if there is no such Variable; raises `StoreUnavailableError`."""

    def set(self, key: str, text: str, before: str | None) -> bool:
        """Write the text if the stored text is still `before` (None: no Variable), else return False.

        Only the database access compares; the execution API overwrites any text. After
        `StoreUnavailableError` the text may or may not have been written.
        """

    def delete(self, key: str) -> None:
        """Delete the Variable, if there is one; raises `StoreUnavailableError`."""


def variable_access() -> VariableAccess:
    """Return the access that works in this process; raises `SettingsError` without Airflow."""
    if find_spec("airflow") is None:
        raise SettingsError(
            "an airflow:// store needs Apache Airflow; set GPU_MANAGER_STORE to a redis:// URL, or "
            f"{how_to_install('airflow')}"
        )
    return CurrentAccess()


class CurrentAccess:
    """Access chosen at each call by Airflow's own check: a process may become a task or trigger later."""

    def get(self, key: str) -> str | None:
        return self._access().get(key)

    def set(self, key: str, text: str, before: str | None) -> bool:
        return self._access().set(key, text, before)

    def delete(self, key: str) -> None:
        self._access().delete(key)

    def _access(self) -> VariableAccess:
        supervised = hasattr(sys.modules.get("airflow.sdk.execution_time.task_runner"), "SUPERVISOR_COMMS")
        return TaskAccess() if supervised else DatabaseAccess()


class TaskAccess:
    """Access through the task's supervisor to the execution API."""

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

    def delete(self, key: str) -> None:
        from airflow.sdk.execution_time.comms import DeleteVariable

        if self.get(key) is not None:
            self._send(DeleteVariable(key=key), key)

    def _send(self, message: Any, key: str) -> Any:
        from airflow.sdk.execution_time import task_runner

        with _reporting(key, "execution API"):
            return task_runner.SUPERVISOR_COMMS.send(message)


class DatabaseAccess:
    """Access through the model to Airflow's database: for API server, scheduler and commands."""

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
                # The row stays locked until the commit: no other write comes between comparison and write.
                row = session.scalar(select(Variable).where(Variable.key == key).with_for_update())
                if (None if row is None else row.get_val()) != before:
                    return False
                if row is None:
                    session.add(Variable(key=key, val=text, description=description))
                else:
                    Variable.set(key, text, description=description, session=session)
                return True
            return False  # another process created it first

    def delete(self, key: str) -> None:
        with _reporting(key, "database"):
            from airflow.models.variable import Variable
            from airflow.utils.session import create_session
            from sqlalchemy import delete

            with create_session() as session:
                session.execute(delete(Variable).where(Variable.key == key))


@contextmanager
def _reporting(key: str, way: str) -> Iterator[None]:
    """Turn every error into an outage: Airflow raises many kinds when it cannot reach a Variable."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise outage(f"Airflow Variable {key!r} cannot be reached through the {way}: {reason}") from error
