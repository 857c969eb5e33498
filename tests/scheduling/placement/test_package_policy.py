"""Faults of a package's policy are told, and nothing is decided on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from resource_manager.core.changes import Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.errors import PolicyError
from resource_manager.scheduling.placement.policies import get_policy, scores_of, takes_seed
from tests import package_policies
from tests.builders import nodes


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package_policies.install(tmp_path, monkeypatch)


@pytest.fixture
def cluster() -> ClusterState:
    """Two servers of two GPUs, of which the first has one allocated."""
    state = ClusterState(nodes("ab"))
    state.apply(Granted(Lease(Request("held", 1), (Placement("a", (0,)),), 1, 0.0), 0.0))
    return state


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "KeyError: 'boom' (our_policies.py:13)"),
        ("twice", "it chose gpu_ids=(0, 0) of 'b', which are not 2 that it can have"),
        ("taken", "it chose server 'a', where that does not fit"),
        ("unknown", "it chose server 'nowhere', where that does not fit"),
        ("pair", "it returned ('a', (0,)), neither a Placement nor None"),
        ("letters", "it chose server 'a', where that does not fit"),
        ("one_argument", "TypeError: one_argument() takes 1 positional argument but 2 were given"),
    ],
)
def test_a_fault_names_policy_package_request_and_what(cluster: ClusterState, name: str, words: str) -> None:
    with pytest.raises(PolicyError) as caught:
        get_policy(name)(cluster, Request("t", 2))
    assert str(caught.value) == f"policy {name!r} of our-policies fails for 't': {words}"


@pytest.mark.parametrize(("name", "chosen"), [("taken", "(0,)"), ("letters", "'ab'")])
def test_gpus_of_a_server_that_fits_may_be_others(cluster: ClusterState, name: str, chosen: str) -> None:
    with pytest.raises(PolicyError, match="which are not 1 that it can have") as caught:
        get_policy(name)(cluster, Request("t", 1))
    assert f"it chose gpu_ids={chosen} of 'a'" in str(caught.value)


@pytest.mark.parametrize("name", ["good", "whole_numbers"])
def test_what_is_right_is_a_placement_of_plain_numbers(cluster: ClusterState, name: str) -> None:
    found = get_policy(name)(cluster, Request("t", 1))
    assert found == Placement("a", (1,))
    assert [type(gpu_id) for gpu_id in found.gpu_ids] == [int]
    assert get_policy(name)(cluster, Request("t", 3)) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "cannot be loaded: AttributeError: module 'our_policies' has no attribute 'missing'"),
        ("Number", "is 5, which cannot be called"),
    ],
)
def test_what_cannot_be_used_is_told_when_it_is_looked_up(name: str, words: str) -> None:
    with pytest.raises(PolicyError) as caught:
        get_policy(name)
    assert str(caught.value) == f"policy {name!r} of our-policies {words}"


def test_a_policy_may_draw_and_score(cluster: ClusterState) -> None:
    assert takes_seed(get_policy("seeded"))
    assert not takes_seed(get_policy("good"))
    assert scores_of(get_policy("seeded", seed=7), cluster, Request("t", 1)) == {"a": 7}
    assert scores_of(get_policy("good"), cluster, Request("t", 1)) == {}
