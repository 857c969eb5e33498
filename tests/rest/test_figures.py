"""Benchmark of the service: it runs without errors; its figures are not asserted."""

from __future__ import annotations

import pytest

from resource_manager.cli.bench import service


@pytest.mark.slow
def test_the_benchmark_runs_without_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MANY_SERVERS", 50)
    results = service.run(seconds=0.3)
    assert results["clients"]["errors"] == 0
    assert results["one_client"]["allocations"] > 0
    assert results["many_servers"]["status_ms"] > 0
