"""`gpu-manager bench`: it measures, and what keeps it from measuring is one line."""

from __future__ import annotations

import signal
from types import ModuleType

import pytest
from click.testing import CliRunner

from resource_manager.cli import main
from resource_manager.cli.bench import service, store
from resource_manager.errors import StoreError
from tests.redis_server import RedisServer


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (["bench", "--seconds", "nan"], 2, "'nan' is not a finite number"),
        (["bench", "--redis", "redis://127.0.0.1:1"], 3, "cannot be reached"),
        (["bench", "--redis", "redis://127.0.0.1:1", "--http"], 3, "cannot be reached"),
        (["--store", "redis://127.0.0.1:1", "bench"], 2, "or that of --redis: leave out --store"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(
    arguments: list[str], exit_code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "memory_figures", lambda seconds: pytest.fail("it measures"))
    done = CliRunner().invoke(main, arguments)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (exit_code, "", 1), done.output
    assert says in done.stderr


def test_a_setting_that_keeps_the_service_from_starting_is_told(
    embedded_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_MANAGER_LOCK_TIMEOUT_S", "soon")
    with (
        pytest.raises(service.BenchError, match=r"^gpu-manager reset: GPU_MANAGER_LOCK_TIMEOUT_S: must be a"),
        service.serving(embedded_redis.fresh_url(), 4),
    ):
        pass


def test_a_second_benchmark_on_one_redis_is_told(embedded_redis: RedisServer) -> None:
    url = embedded_redis.fresh_url().partition("?")[0]
    pair = store.manager_pair(url, servers=4)
    try:
        with store.open_manager(url, servers=4) as other:
            while other.allocate_resources(f"other-{other.summary()['version']}", 8, 1):
                pass
            with pytest.raises(StoreError, match="run one gpu-manager bench at a time"):
                pair()
    finally:
        store.clean_up(url)


def test_clients_that_get_no_answer_are_told_of(
    embedded_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "CLIENT_PROCESSES", 1)
    url = embedded_redis.fresh_url().partition("?")[0]
    try:
        with pytest.raises(StoreError, match="clients got no answer"):
            store.many_clients(url, -1.0)
    finally:
        store.clean_up(url)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("option", "measured"), [((), store), (("--http",), service)])
def test_a_benchmark_that_is_told_to_end_ends_what_it_started(
    option: tuple[str, ...], measured: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    def run(*given: object, **more: object) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            ended.append("its service")

    monkeypatch.setattr(measured, "run", run)
    done = CliRunner().invoke(main, ["bench", *option])
    assert (done.exit_code, ended) == (143, ["its service"])


def test_one_client_is_measured_at_a_service_of_its_own() -> None:
    with store.redis_server(None) as redis, service.serving(redis, 4) as (url, tokens):
        assert service.one_client(url, tokens[0], 0.1)["allocations"] > 0


@pytest.mark.e2e
def test_the_benchmark_of_the_service_runs_without_errors() -> None:
    results = service.run(seconds=0.3, servers=50)
    assert results["clients"]["errors"] == 0
    assert results["one_client"]["allocations"] > 0
    assert results["many_servers"]["status_ms"] > 0
