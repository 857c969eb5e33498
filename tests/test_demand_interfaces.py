"""Every interface takes every field of a `Demand`: one value of each is sent through all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from click.testing import CliRunner

from resource_manager import Demand, GPUResourceManager, Settings
from resource_manager.cli import main
from resource_manager.cli.lease_commands import allocate, explain, submit
from resource_manager.core.models import Gpu, Node, Request
from resource_manager.manager import requests
from resource_manager.manager.arguments import ALIASES, POSITIONAL
from resource_manager.manager.demand import DemandArguments, DemandOptions
from resource_manager.rest.client import ServiceClient
from tests.cli.targets import holding
from tests.listening import client_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Airflow's own, on import
    from airflow.providers.standard.operators.python import PythonOperator

    from resource_manager.airflow import (
        GPUAllocateOperator,
        GPUAvailableSensor,
        GPUTrainingOperator,
        gpu_lease,
        with_gpus,
    )
    from resource_manager.airflow.decorators.gpu import GPUDecoratedOperator
    from resource_manager.airflow.task_demand import (
        FIELDS,
        demand_of,
        demand_params,
        demand_templates,
    )

VALUES: dict[str, Any] = {
    "lease_id": "t",
    "gpus": 1,
    "gpu_milli": 500,
    "cpus": 3,
    "resources": {"memory_mib": 4096, "disk_tb": 0.5},
    "gpu_types": ["A100", "H100"],
    "types": "first",
    "gpu_memory": "20GB",
    "link": "require",
    "vendor": "nvidia",
    "labels_required": {"zone": "a", "rack": "7"},
    "prefer_server": "s",
    "server": "s",
    "nodes": 2,
    "spread": "pack",
    "same": "zone",
    "prefer_same": "rack",
    "team": "vision",
    "owner": "ursula",
    "priority": -7,
    "expected_runtime": 600.0,
    "ttl": 90.0,
    "utility": 16.0,
    "target": 7200.0,
    "sensitivity": 0.25,
    "quarantine": True,
    "preemptible": False,
    "preempt_grace": 30.0,
    "preempt_signal": "USR2",
    "preemption_delay": 5.0,
    "labels": {"model": "bert", "size": "large"},
    "idle_below": 2.5,
    "idle_after": 1800.0,
    "idle_action": "release",
    "on_idle": "requeue",
    "max_runtime": 3600.0,
    "requeue_after": 900.0,
    "deadline": "2030-01-31T18:00:00+01:00",
}
ORIGINAL = {name: alias for alias, name in ALIASES.items()}
NODE = Node(
    "s",
    1,
    {"cpus": 8, "memory_mib": 8192, "disk_tb": 1.5},
    (Gpu(0, "A100", memory_mib=81_920),),
    "127.0.0.1",
    labels={"zone": "a", "rack": "7", "row": "1"},
)


def as_text(value: Any) -> str:
    """Return a value as a template or a query has it."""
    if isinstance(value, dict):
        return ",".join(f"{name}={item}" for name, item in value.items())
    return ",".join(value) if isinstance(value, list) else str(value)


def as_options(values: dict[str, Any]) -> list[str]:
    words = [values["lease_id"]]
    for option in allocate.get_params(click.Context(allocate)):
        value = values.get(option.name or "")
        if not isinstance(option, click.Option) or value is None:
            continue
        items = [f"{name}={item}" for name, item in value.items()] if isinstance(value, dict) else value
        for item in items if isinstance(items, list) else [items]:
            words += (
                [(option.opts if value else option.secondary_opts)[0]]
                if option.is_flag
                else [option.opts[0], str(item)]
            )
    return words


@pytest.fixture
def manager() -> Iterator[GPUResourceManager]:
    with GPUResourceManager.from_url("memory://", inventory=[NODE]) as manager:
        yield manager


@pytest.fixture
def client(manager: GPUResourceManager, tmp_path: Path) -> Iterator[ServiceClient]:
    with client_of(manager, tmp_path) as client:
        yield client


Built = list[tuple[Demand, Request]]


def requested(manager: GPUResourceManager, demand: Demand) -> Request:
    return manager.read(lambda cluster, now: requests.build_request(demand, cluster))


def rest(body: Callable[[ServiceClient], httpx.Response]) -> Callable[..., Any]:
    def ask(client: ServiceClient, manager: GPUResourceManager) -> None:
        answer = body(client)
        assert answer.is_success, answer.text

    return ask


def by_command(name: str) -> Callable[..., Any]:
    def ask(client: ServiceClient, manager: GPUResourceManager) -> None:
        words = as_options(VALUES)
        command = [name, *words[name == "explain" :], "--json"]
        done = CliRunner().invoke(main, command, obj=holding(manager))
        assert done.exit_code == 0, done.output

    return ask


def by_operator(kind: Any, values: Callable[[], dict[str, Any]], **more: Any) -> Callable[..., Any]:
    def ask(client: ServiceClient, manager: GPUResourceManager) -> None:
        operator = kind(task_id="x", owner=VALUES["owner"], **more, **values())
        manager.submit(demand_of(operator, operator.given_fields(), {}, VALUES["lease_id"]))

    return ask


def own() -> dict[str, Any]:
    return {name: VALUES[name] for name in FIELDS}


def texts() -> dict[str, Any]:
    return {name: as_text(VALUES[name]) for name in FIELDS}


def of_the_form() -> dict[str, Any]:
    """Values of the trigger form, as its templates render them."""
    form = demand_params()
    assert set(form) == set(demand_templates()) == set(FIELDS)
    for name in form:
        value = VALUES[name] if isinstance(VALUES[name], int | bool) else as_text(VALUES[name])
        form[name].resolve(value)
        assert demand_templates()[name] == f"{{{{ params.{name} }}}}"
    return texts()


INTERFACES: dict[str, Callable[[ServiceClient, GPUResourceManager], Any]] = {
    "Python": lambda client, manager: manager.submit(**VALUES),
    "Python, by position": lambda client, manager: manager.submit(
        *(VALUES[name] for name in POSITIONAL),
        **{
            name: VALUES[name]
            for name in list(VALUES)
            if name not in ("lease_id", "gpus", "cpus", "prefer_server")
        },
    ),
    "Demand": lambda client, manager: manager.submit(Demand(**VALUES)),
    "explain": lambda client, manager: manager.explain(**VALUES),
    "batch": lambda client, manager: manager.allocate_batch([VALUES]),
    "original": lambda client, manager: manager.allocate_resources(
        "t", 1, 3, "s", **{name: VALUES[name] for name in VALUES if name not in ALIASES.values()}
    ),
    "client": lambda client, manager: client.submit(**VALUES),
    "client, Demand": lambda client, manager: client.try_allocate(Demand(**VALUES)),
    "client, explain": lambda client, manager: client.explain(**VALUES),
    "client, batch": lambda client, manager: client.allocate_batch(
        [
            VALUES,
        ]
    ),
    "REST": rest(lambda client: client._http.client.post("/api/allocate", json=VALUES)),
    "REST, original": rest(
        lambda client: client._http.client.post(
            "/api/submit",
            json={
                {new: old for old, new in ALIASES.items()}.get(name, name): VALUES[name] for name in VALUES
            },
        )
    ),
    "REST, explain": rest(
        lambda client: client._http.client.get(
            "/api/explain",
            params={
                name: as_text(value).split(",") if isinstance(value, dict) else value
                for name, value in VALUES.items()
            },
        )
    ),
    "command allocate": by_command("allocate"),
    "command submit": by_command("submit"),
    "command explain": by_command("explain"),
    "GPUTrainingOperator": by_operator(GPUTrainingOperator, own, command="true"),
    "GPUAllocateOperator": by_operator(GPUAllocateOperator, own),
    "GPUAvailableSensor": by_operator(GPUAvailableSensor, own),
    "templates": by_operator(GPUTrainingOperator, texts, command="true"),
    "trigger form": by_operator(GPUTrainingOperator, of_the_form, command="true"),
}


def test_a_function_takes_every_field_but_several_servers(
    manager: GPUResourceManager, client: ServiceClient, built_requests: Built
) -> None:
    expected = requested(manager, Demand(**{**VALUES, "nodes": 1}))
    built_requests.clear()
    by_operator(GPUDecoratedOperator, lambda: {**own(), "nodes": 1}, python_callable=print)(client, manager)
    assert [request for _, request in built_requests] == [expected]


def test_any_operator_takes_every_field_but_several_servers(
    manager: GPUResourceManager, client: ServiceClient, built_requests: Built
) -> None:
    expected = requested(manager, Demand(**{**VALUES, "nodes": 1}))
    built_requests.clear()
    operator: Any = with_gpus(PythonOperator, **{**own(), "nodes": 1})(
        task_id="x", owner=VALUES["owner"], python_callable=print
    )
    manager.submit(demand_of(operator, operator.given_fields(), {}, VALUES["lease_id"]))
    assert [request for _, request in built_requests] == [expected]


def test_the_table_has_a_value_other_than_the_default_for_every_field() -> None:
    assert list(VALUES) == list(Demand.model_fields)
    assert not [name for name, field in Demand.model_fields.items() if field.default == VALUES[name]]


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.filterwarnings("ignore")
def test_an_interface_takes_every_field(
    interface: str, manager: GPUResourceManager, client: ServiceClient, built_requests: Built
) -> None:
    expected = requested(manager, Demand(**VALUES))
    built_requests.clear()
    INTERFACES[interface](client, manager)
    [(_, request)] = built_requests
    if "explain" in interface and request.lease_id.startswith("what-if"):
        request = request.for_task("t")
    assert request == expected


def test_the_declared_names_are_the_fields() -> None:
    assert {*POSITIONAL, *DemandOptions.__annotations__} == Demand.model_fields.keys()
    assert {*POSITIONAL, *DemandArguments.__annotations__} == {*Demand.model_fields, *ALIASES}
    for method in ("allocate", "try_allocate", "submit", "explain"):
        assert [*signature(getattr(GPUResourceManager, method)).parameters][1:5] == [*POSITIONAL]
    for command in (allocate, submit, explain):
        options = {param.name for param in command.get_params(click.Context(command))}
        assert options >= Demand.model_fields.keys() - {"lease_id"}
    for operator in (GPUTrainingOperator, GPUAllocateOperator, GPUDecoratedOperator, GPUAvailableSensor):
        named = {name for kind in operator.__mro__ for name in signature(kind).parameters}
        assert named >= {*FIELDS, "owner"}, operator


def test_the_openapi_document_has_every_field_and_the_originals_names(client: ServiceClient) -> None:
    described = client._http.client.get("/openapi.json").json()
    named = {*Demand.model_fields, *ALIASES}
    assert described["components"]["schemas"]["AllocateBody"]["properties"].keys() == named
    assert {each["name"] for each in described["paths"]["/api/explain"]["get"]["parameters"]} == named


def test_a_lease_around_tasks_takes_what_its_operator_takes() -> None:
    from airflow.sdk import DAG

    with DAG("d", schedule=None), gpu_lease(**own()) as lease:
        pass
    demand = demand_of(lease.allocate, lease.allocate.given_fields(), {}, "t")
    assert demand.labels_required == VALUES["labels_required"]


@pytest.mark.parametrize("duration", [90, 90.0, "90", "90s", "1.5min", timedelta(seconds=90)])
def test_durations_are_seconds_texts_or_timedeltas(
    manager: GPUResourceManager, client: ServiceClient, built_requests: Built, duration: Any
) -> None:
    options = dict.fromkeys(("expected_runtime", "ttl", "target"), duration)
    manager.submit("t", 1, utility=1.0, **options)
    client.submit("u", 1, utility=1.0, **options)
    operator = GPUTrainingOperator(task_id="x", command="true", gpus=1, utility="1", **options)
    manager.submit(demand_of(operator, operator.given_fields(), {}, "v"))
    for _, request in built_requests:
        assert request.utility is not None
        assert (request.ttl_s, request.expected_runtime_s, request.utility.target_s) == (90.0,) * 3


def test_a_demand_without_a_ttl_lives_as_long_as_the_settings_say() -> None:
    with GPUResourceManager(Settings(store="memory://"), cluster={"lease_ttl_s": 77.0}) as manager:
        assert requested(manager, Demand(lease_id="t", gpus=2)).ttl_s == 77.0
