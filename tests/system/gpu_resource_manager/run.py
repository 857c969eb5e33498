"""The test that a system test of Airflow's layout ends with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from resource_manager import GPUResourceManager


def get_test_run(dag: Any, **conf: Any) -> Callable[[str], None]:
    """Return a test that runs the DAG on a real store, with real jobs of this machine."""

    @pytest.mark.e2e
    @pytest.mark.filterwarnings("ignore")
    def test_run(store: str) -> None:
        assert dag.test(run_conf=conf).state == "success"
        with GPUResourceManager.from_url(store) as manager:
            changes = [change["change"] for change in manager.history()]
            assert ("granted" in changes, manager.leases(), manager.queue()) == (True, [], [])

    return test_run
