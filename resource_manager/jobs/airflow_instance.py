"""Instance id, which separates one Airflow's leases from those of other Airflow instances on the same store.

It is the setting `GPU_MANAGER_INSTANCE`, or else a random id that the API server creates once. Tasks can read
neither Airflow's database nor the API server's environment, so they read it from an Airflow Variable.
"""

from __future__ import annotations

import secrets
from functools import cache

from resource_manager.errors import SettingsError
from resource_manager.settings import Settings, valid_instance
from resource_manager.storage.airflow_variable.access import CurrentAccess, DatabaseAccess

VARIABLE = "gpu_manager_instance"
DESCRIPTION = "Separates this Airflow's GPU leases from those of others on the same store; do not change it."
ID_BYTES = 4
PUBLISH_ATTEMPTS = 5


@cache
def instance_id() -> str:
    """Return this Airflow's instance id, which the process then caches.

    Raises `SettingsError` if it is invalid or not there yet, `StoreUnavailableError` if Airflow does not
    answer.
    """
    configured = Settings.load().instance
    if configured is not None:
        return configured
    text = CurrentAccess().get(VARIABLE)
    if text is None:
        raise SettingsError(
            "this Airflow has no instance id yet: start its API server with the plugin gpu_resource_manager, "
            f"which writes it into the Variable {VARIABLE!r}, or set GPU_MANAGER_INSTANCE in all components"
        )
    return instance_in_variable(text)


def instance_in_variable(text: str) -> str:
    """Return the text of the Variable if it is an instance id; raises `SettingsError`."""
    try:
        return valid_instance(text)
    except ValueError as error:
        raise SettingsError(f"Airflow Variable {VARIABLE!r}: {error}") from error


@cache
def publish_instance() -> str:
    """Write the instance id into the Variable, once a process, for those without the setting; return it.

    Only the API server can, since it has the database. Several that start at once agree on one id: the first
    one written if it is random. A configured id replaces an existing one, such as in a copied database.
    """
    configured = Settings.load().instance
    database = DatabaseAccess()
    for _ in range(PUBLISH_ATTEMPTS):
        before = database.get(VARIABLE)
        if before is not None and configured in (None, before):
            return instance_in_variable(before)
        # With a letter first, since Airflow's REST API reads 710e3660 as a number and answers Infinity.
        wanted = configured or f"a{secrets.token_hex(ID_BYTES)}"
        if database.set(VARIABLE, wanted, before, DESCRIPTION):
            return wanted
    raise SettingsError(
        f"Airflow Variable {VARIABLE!r} was changed by another process {PUBLISH_ATTEMPTS} times: "
        "set the same GPU_MANAGER_INSTANCE in all API servers"
    )
