"""Benchmark of the service: it runs without errors; its figures are not asserted."""

from __future__ import annotations

import pytest

from resource_manager.cli.bench import service
from resource_manager.cli.bench.store import redis_server


def test_one_client_is_measured_at_a_service_of_its_own() -> None:
    with redis_server(None) as redis, service.serving(redis, 4) as (url, tokens):
        assert service.one_client(url, tokens[0], 0.1)["allocations"] > 0


@pytest.mark.e2e
def test_the_benchmark_runs_without_errors() -> None:
    results = service.run(seconds=0.3, servers=50)
    assert results["clients"]["errors"] == 0
    assert results["one_client"]["allocations"] > 0
    assert results["many_servers"]["status_ms"] > 0
