"""Colour of a gang's lease: one over all its servers, on every page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.core.models import Gpu, Node
from resource_manager.rest.tokens import Role


@pytest.fixture
def manager() -> Iterator[GPUResourceManager]:
    """Three servers of two GPUs, two with a gang, one with another lease."""
    nodes = [
        Node(name, number, {"cpus": 8}, tuple(Gpu(n) for n in range(2)), f"10.0.0.{number}")
        for number, name in enumerate("abc")
    ]
    with GPUResourceManager.from_url("memory://", inventory=nodes) as manager:
        assert manager.allocate_resources("gang", 2, 1, nodes=2)
        assert manager.allocate_resources("alone", 2, 1)
        yield manager


def test_a_gangs_cells_have_one_colour_on_all_its_servers(as_role: Callable[..., FlaskClient]) -> None:
    client = as_role(Role.READER)

    def page(path: str) -> str:
        return client.get(path).get_data(as_text=True).partition("<main")[2]

    drawn = re.sub('class="legend".*?</p>', "", page("/"), flags=re.DOTALL)
    cells = re.findall(r'class="[^"]*\b(h\d+ v\d+)', drawn)
    [(gang, on_two), (_, on_one)] = Counter(cells).most_common()
    assert (on_two, on_one) == (2, 1), "a cell on each server"
    for server in (0, 1):
        assert set(re.findall(r"swatch [^\"]*?(h\d+ v\d+)", page(f"/servers/{server}"))) == {gang}
    assert gang not in page("/servers/2")


def test_a_gang_whose_members_share_a_gpu_is_one_lease_there(
    manager: GPUResourceManager, as_role: Callable[..., FlaskClient]
) -> None:
    assert manager.release_resources("alone")
    manager.submit("pair", 1, gpu_milli=500, nodes=2, spread="pack")
    drawn = as_role(Role.READER).get("/").get_data(as_text=True)
    [cell] = [each for each in re.findall(r'title="GPU [^"]*"', drawn) if "pair" in each]
    assert cell.count("pair") == 1
    assert "rank 0, 1 of 2" in drawn
