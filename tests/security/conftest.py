"""The service of the API's tests, to be attacked."""

from tests.api.conftest import as_role, kept, manager, open_client, service

__all__ = ["as_role", "kept", "manager", "open_client", "service"]
