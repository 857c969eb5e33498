"""Gives Airflow a home of its own before anything imports it, and the service of the API's tests."""

import os
import tempfile

os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="airflow-home-"))
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")

from tests.api.conftest import as_role, kept, manager, open_client, service

__all__ = ["as_role", "kept", "manager", "open_client", "service"]
