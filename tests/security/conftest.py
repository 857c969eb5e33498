"""Fixtures of the API's tests, for the service under attack."""

from tests.rest.conftest import as_role, clock, kept, manager, manager_class, open_client, service

__all__ = ["as_role", "clock", "kept", "manager", "manager_class", "open_client", "service"]
