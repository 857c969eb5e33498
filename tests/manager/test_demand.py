"""Limits of a request: GPUs by the stored inventory, with errors in the caller's parameter names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager import GPUResourceManager
from resource_manager.core.changes import ClusterSettingsChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.models import Gpu, Link, Node, Spread, TypeChoice
from resource_manager.errors import InvalidRequestError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.demand import Demand
from resource_manager.manager.requests import _checked, build_request, gpu_range
from resource_manager.rest.schemas import ExplainQuery
from tests.builders import granted_lease, nodes, redefine
from tests.redis_server import RedisServer

BUILT_IN = default_inventory()
OTHERS = {
    "one GPU": (nodes("a", gpus=1), 1),
    "a server less": (BUILT_IN[:3], 8),
    "another name": ((*BUILT_IN[:3], Node("dgx", 3, {"cpus": 64}, BUILT_IN[3].gpus)), 8),
    "more CPUs": (default_inventory(4, 8, 65), 8),
    "a type": (tuple(Node(n.name, n.server_id, n.resources, (Gpu(0, "A100"),)) for n in BUILT_IN), 1),
    "large": ((*nodes("ab", gpus=4), *nodes("c", gpus=16)), 16),
    "no GPU": (nodes("a", gpus=0), 1),
}


@pytest.fixture
def manager() -> Iterator[GPUResourceManager]:
    with GPUResourceManager.from_url("memory://") as manager:
        yield manager


def limits(inventory: tuple[Node, ...], **settings: int) -> tuple[int, int]:
    cluster = ClusterState(inventory)
    cluster.apply(ClusterSettingsChanged(ClusterSettings(**settings), 0.0))  # type: ignore[arg-type]
    return gpu_range(cluster)


def refusal(manager: GPUResourceManager, method: str, *arguments: Any, **options: Any) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        getattr(manager, method)(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestRange:
    def test_the_built_in_inventory_keeps_the_range_of_the_original(self) -> None:
        assert limits(BUILT_IN) == (2, 8)

    @pytest.mark.parametrize("name", OTHERS)
    def test_any_other_inventory_allows_one_gpu_to_all_of_its_largest_server(self, name: str) -> None:
        inventory, most = OTHERS[name]
        assert limits(inventory) == (1, most)

    def test_settings_override_the_inventory(self) -> None:
        assert limits(BUILT_IN, min_gpus=1) == (1, 8)
        assert limits(BUILT_IN, max_gpus=1) == (1, 1)
        assert limits(BUILT_IN, min_gpus=0, max_gpus=4) == (0, 4)
        assert limits(BUILT_IN, min_gpus=9) == (9, 9)
        assert limits(nodes("a", gpus=4), max_gpus=2) == (1, 2)
        assert limits(nodes("a", gpus=4), min_gpus=0) == (0, 4)

    def test_it_follows_the_inventory(self, manager: GPUResourceManager) -> None:
        assert manager.gpu_range() == (2, 8)
        manager.allocate_resources("holds", 8, 1)
        redefine(manager, nodes=[*default_inventory(4, 8, 32)])  # changed in place: the same GPUs
        assert manager.gpu_range() == (1, 8)
        redefine(manager, nodes=nodes("abc", gpus=4))  # gpu-server-0 stays, closed, and does not count
        assert manager.gpu_range() == (1, 4)
        redefine(manager, nodes=BUILT_IN)
        assert manager.gpu_range() == (2, 8)

    def test_it_is_computed_once_for_an_inventory(self) -> None:
        looked: list[str] = []

        class Counted(tuple):
            def __len__(self) -> int:
                looked.append("")
                return super().__len__()

        cluster = ClusterState([Node("a", 0, {"cpus": 8}, Counted((Gpu(0), Gpu(1))))])
        looked.clear()
        build_request(Demand(lease_id="t", gpus=2), cluster)
        first = len(looked)
        for _ in range(100):
            build_request(Demand(lease_id="t", gpus=2), cluster)
        assert (first > 0, len(looked)) == (True, first)

    def test_a_process_that_knows_only_the_url_uses_the_stored_inventory(
        self, embedded_redis: RedisServer, tmp_path: Path
    ) -> None:
        url = embedded_redis.fresh_url()
        GPUResourceManager.from_url(url, inventory=BUILT_IN).close()
        worker = GPUResourceManager.from_url(url)
        assert "between 2 and 8 (the inventory is the built-in one" in refusal(worker, "submit", "t", 1)
        servers = tmp_path / "servers.toml"
        servers.write_text('[[servers]]\nname = "box"\ngpus = 4\ncpus = 16\n')
        command = [sys.executable, "-m", "resource_manager.cli", "--store", url, "apply", "--yes"]
        subprocess.run([*command, str(servers)], check=True, timeout=60)
        with worker, GPUResourceManager.from_url(url) as late:
            assert granted_lease(worker.submit("t", 1))["gpu_ids"] == [0]
            assert granted_lease(late.submit("u", 1, prefer_server="box"))["gpu_ids"] == [1]
            assert "between 1 and 4 (the largest server has 4), got 5" in refusal(late, "submit", "v", 5)


class TestMessages:
    def test_the_limit_and_its_setting_are_named(self) -> None:
        with GPUResourceManager.from_url("memory://", inventory=nodes("a", gpus=8, cpus=64)) as manager:
            assert refusal(manager, "submit", "t", 9, 1) == (
                "gpus must be between 1 and 8 (the largest server has 8), got 9"
            )
            assert refusal(manager, "submit", "t", 0, 1) == (
                "gpus must be between 1 and 8 (the largest server has 8; min_gpus of the cluster sets "
                "another limit), got 0"
            )
            assert "cpus must be between 1 and 64 (what the largest server has), got 65" in refusal(
                manager, "submit", "t", 1, 65
            )
        with GPUResourceManager.from_url("memory://", max_gpus=4) as manager:
            words = "required_gpus must be between 2 and 4 (set by max_gpus of the cluster), got 5"
            assert refusal(manager, "allocate_resources", "t", 5, 1) == words

    def test_a_range_of_one_is_no_range(self) -> None:
        with GPUResourceManager.from_url("memory://", inventory=nodes("a", gpus=1, cpus=64)) as manager:
            assert refusal(manager, "submit", "t", 3, 1) == "gpus must be 1, got 3 (the largest server has 1)"

    def test_errors_use_the_callers_parameter_names(self, manager: GPUResourceManager) -> None:
        for method in ("submit", "explain"):
            assert refusal(manager, method, "t", 9, 1).startswith("gpus must be between 2 and 8")
            assert refusal(manager, method, "t", required_gpus=9).startswith("required_gpus must")
            assert refusal(manager, method, "t", 2, 99).startswith("cpus must be between 1 and 64")
        original = "allocate_resources"
        assert refusal(manager, original, "t", 1, 1).startswith("required_gpus must be between 2 and 8")
        assert refusal(manager, original, "t", 2, 99).startswith("required_cpus must be between 1 and 64")
        batch = "allocate_batch"
        assert refusal(manager, batch, [{"task_id": "t", "gpus": 1}]).startswith("requests.0.gpus must")
        assert refusal(manager, batch, [{"task_id": "t", "required_gpus": 1}]).startswith("requests.0.req")
        assert manager.leases() == []

    def test_an_unknown_server_is_named_by_the_parameter_used(self, manager: GPUResourceManager) -> None:
        known = "is not in the inventory of 4 servers: "
        known += f"it has {', '.join(server['server_name'] for server in manager.servers())}"
        assert refusal(manager, "submit", "t", 2, prefer_server="x") == f"prefer_server 'x' {known}"
        assert refusal(manager, "submit", "t", 2, server=7) == f"server 7 {known}"
        assert refusal(manager, "allocate_resources", "t", 2, 1, "x") == f"prefer_server_id 'x' {known}"

    @pytest.mark.parametrize(
        ("gpus", "advice"),
        [
            (0.5, "got 0.5; that GPU fraction is gpus=1, gpu_milli=500"),
            (0.25, "got 0.25; that GPU fraction is gpus=1, gpu_milli=250"),
            ("0.5", "got '0.5'; that GPU fraction is gpus=1, gpu_milli=500"),
            (1.5, "got 1.5"),
            (2.0, "got 2.0"),
            (True, "got True"),
            ("two", "got 'two'"),
            (float("nan"), "got nan"),
            (float("inf"), "got inf"),
            (1e-9, "got 1e-09"),
        ],
    )
    def test_a_fractional_number_of_gpus_gets_advice_on_gpu_milli(
        self, manager: GPUResourceManager, gpus: Any, advice: str
    ) -> None:
        assert refusal(manager, "submit", "t", gpus) == f"gpus must be a whole number, {advice}"
        original = refusal(manager, "allocate_resources", "t", gpus, 1)
        assert original == f"required_gpus must be a whole number, {advice}".replace(
            "is gpus", "is required_gpus"
        )

    def test_the_advised_gpu_fraction_is_granted(self, manager: GPUResourceManager) -> None:
        assert refusal(manager, "submit", "t", 0.5).endswith("gpus=1, gpu_milli=500")
        assert manager.submit("t", gpus=1, gpu_milli=500)["gpu_milli"] == 500
        assert granted_lease(manager.submit("u", gpu_milli=500))["gpu_ids"] == [0], "one GPU is meant"
        assert refusal(manager, "submit", "v", 0, gpu_milli=500).endswith("gpus=1, got gpus=0")

    @pytest.mark.parametrize(
        ("wrong", "field"),
        [
            ({"ttl": 0.0}, "ttl"),
            ({"gpu_milli": 500}, "gpu_milli"),
            ({"gpu_milli": 1001}, "gpu_milli"),
            ({"resources": {"a": -1}}, "resources"),
            ({"expected_runtime": -1.0}, "expected_runtime"),
            ({"labels": {"a": "x" * 9000}}, "labels"),
            ({"utility": -1.0, "target": 1.0, "expected_runtime": 1.0}, "utility"),
            ({"utility": 1.0, "target": 1.0}, "expected_runtime"),
        ],
    )
    def test_an_error_says_which_parameter_is_wrong(
        self, manager: GPUResourceManager, wrong: dict[str, Any], field: str
    ) -> None:
        with pytest.raises(InvalidRequestError) as refused:
            manager.submit("t", gpus=2, **wrong)
        assert refused.value.field == field
        assert field in str(refused.value)

    def test_two_values_of_one_option_are_refused(self, manager: GPUResourceManager) -> None:
        assert refusal(manager, "submit", "t", 2, required_gpus=4) == (
            "gpus is 2, and required_gpus is 4: give one of them"
        )
        assert granted_lease(manager.submit("t", 2, required_gpus=2, required_cpus=3))["cpu_count"] == 3

    def test_cpus_default_to_one(self, manager: GPUResourceManager) -> None:
        assert granted_lease(manager.submit("t", 2))["cpu_count"] == 1
        assert refusal(manager, "submit", "u") == "gpus is missing"

    def test_zero_gpus_only_if_the_settings_allow_it(self, manager: GPUResourceManager) -> None:
        assert "must be between" in refusal(manager, "submit", "t", 0)
        with GPUResourceManager.from_url("memory://", min_gpus=0) as other:
            assert granted_lease(other.submit("t", 0))["gpu_ids"] == []

    def test_a_server_is_given_by_name_or_number_also_as_text(self) -> None:
        inventory = (*nodes("abc"), Node("1", 7, {"cpus": 8}, (Gpu(0),)))
        cluster = ClusterState(inventory)

        def placed(server: Any) -> str | None:
            return build_request(Demand.of("t", 1, server=server), cluster).required_node

        assert [placed(one) for one in ("b", 1, "2", "1", 7, "7")] == ["b", "b", "c", "1", "1", "1"]
        for wrong in ("9" * 5000, "²", "-1", True, ""):
            with pytest.raises(InvalidRequestError, match=r"^server "):
                placed(wrong)

    def test_a_wrong_number_of_cpus_is_named(self, manager: GPUResourceManager) -> None:
        for wrong in (0.5, "2", True):
            with pytest.raises(InvalidRequestError, match=r"^cpus must be a whole number, got .\S+$"):
                manager.submit("t", 2, wrong)  # type: ignore[arg-type]

    def test_a_number_of_thousands_of_digits_is_refused_in_one_line(
        self, manager: GPUResourceManager
    ) -> None:
        for field in ("gpus", "cpus", "priority", "nodes", "ttl", "deadline", "utility"):
            said = refusal(manager, "submit", "t", **{"gpus": 2, field: 10**5000})
            assert said.startswith(f"{field} must be ")
            assert said.endswith(", got a number of more digits than are shown")


TEXTS = st.text(st.sampled_from('ab-_/ .:@é\\"\u200d中'), max_size=12)


@given(
    lease_id=TEXTS,
    gpus=st.integers(0, 8),
    cpus=st.integers(0, 64),
    team=TEXTS,
    owner=TEXTS,
    vendor=TEXTS,
    same=TEXTS,
    labels=st.none() | st.dictionaries(TEXTS, TEXTS, max_size=2),
    resources=st.none() | st.dictionaries(TEXTS, st.integers(0, 9) | st.floats(0, 9), max_size=2),
    ttl=st.none() | st.floats(0.1, 1e8),
    expected_runtime=st.none() | st.integers(1, 10**8),
    priority=st.integers(-(10**6), 10**6),
    nodes=st.integers(1, 3),
)
def test_a_request_of_a_demand_is_as_it_will_be_read_back(**demand: Any) -> None:
    """Also one that is not converted to find that out."""
    with GPUResourceManager.from_url("memory://") as manager:
        try:
            request = manager.read(lambda cluster, now: build_request(Demand.of(**demand), cluster))
        except InvalidRequestError:
            return
        assert _checked(request) == request


def test_the_longest_names_that_are_not_converted_are_below_the_limit_of_a_request() -> None:
    quotes = dict.fromkeys(("team", "owner", "vendor", "same", "prefer_same"), '"' * 250)
    with GPUResourceManager.from_url("memory://") as manager:
        demand = Demand.of('"' * 1000, 2, 1, **quotes, nodes=2)  # type: ignore[arg-type]
        request = manager.read(lambda cluster, now: build_request(demand, cluster))
    assert _checked(request) == request


def test_numbers_of_numpy_are_numbers_and_its_truth_values_none() -> None:
    numbers: dict[str, Any] = {"gpus": np.int64(4)}
    gpus = Demand.of(lease_id="t", **numbers).gpus
    assert (gpus, type(gpus)) == (4, int)
    with pytest.raises(InvalidRequestError, match=r"^gpus must be a whole number"):
        Demand.of(lease_id="t", **{**numbers, "gpus": np.bool_(True)})


def test_what_a_demand_leaves_out_is_as_if_its_defaults_were_given() -> None:
    cluster = ClusterState(BUILT_IN)
    for short in (Demand.of("a", 2, 1), ExplainQuery(gpus=2, cpus=1)):
        full = Demand.model_validate({name: getattr(short, name) for name in Demand.model_fields})
        assert len(full.model_fields_set) == len(Demand.model_fields)
        assert build_request(short, cluster) == build_request(full, cluster)


def test_values_that_a_demand_gives_reach_the_request_in_its_types() -> None:
    demand = Demand.of("a", 2, 1, types="first", gpu_types=["A100"], link="require", nodes=2, spread="pack")
    cluster = ClusterState(default_inventory())
    request = build_request(demand, cluster)
    assert (request.types, request.gpu_types) == (TypeChoice.FIRST, ("A100",))
    assert (request.link, request.spread) == (Link.REQUIRE, Spread.PACK)
    assert type(request.types) is TypeChoice


def test_a_default_of_a_kind_of_demand_of_ones_own_counts() -> None:
    class OfVision(Demand):
        team: str = "vision"
        priority: int = 3

    request = build_request(OfVision(lease_id="a", gpus=2, cpus=1, priority=1), ClusterState(BUILT_IN))
    assert (request.team, request.priority) == ("vision", 1)
