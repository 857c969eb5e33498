"""What a name finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resource_manager.core.changes import Granted, MembersReleased, Queued
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.core.name_lookup import find, find_preferring_pending, name_in
from resource_manager.core.names import short_id
from resource_manager.errors import AmbiguousNameError, LeaseNotFoundError
from tests.builders import nodes
from tests.core.test_names import RUNS, request, task


def cluster_of(*waiting: Request, held: tuple[Request, ...] = ()) -> ClusterState:
    """Return a cluster whose leases arrived first, on GPUs of their own, and then the pending requests."""
    cluster = ClusterState(nodes("ab", gpus=8))
    for number, each in enumerate(held, start=1):
        cluster.apply(
            Granted(Lease(each, (Placement("a", (number - 1,)),), number, 0.0, sequence=number), 0.0)
        )
    for number, each in enumerate(waiting, start=len(held) + 1):
        cluster.apply(Queued(each, 0.0, number, 0.0))
    return cluster


def test_the_name_of_an_id_is_that_of_what_has_it() -> None:
    cluster = cluster_of(task(2), held=(task(1),))
    first, second = (*cluster.leases, *cluster.pending)
    assert name_in(cluster, first) == f"my_dag.train {short_id(1)}"
    assert name_in(cluster, second) == f"my_dag.train {short_id(2)}"
    assert name_in(cluster, "gone") == "gone"


def test_a_lease_is_found_by_each_of_its_names() -> None:
    cluster = cluster_of(task(2, 4), held=(task(1), task(1, 3)))
    (train, mapped), (pending,) = cluster.leases.values(), cluster.pending.values()
    for text in ("my_dag.train[3]", mapped.lease_id, short_id(2)):
        assert find(cluster, text) is mapped
    assert find(cluster, short_id(1)) is train
    assert find(cluster, "my_dag.train", pending=True) is pending, "the only one of a mapped task"
    assert find_preferring_pending(cluster, "my_dag.train") is pending, "it is the one that waits"
    assert find_preferring_pending(cluster, "my_dag.train[3]") is mapped
    with pytest.raises(AmbiguousNameError, match="names 2"):
        find_preferring_pending(cluster_of(held=(task(1), task(2))), "my_dag.train")
    group = task(1, task_id="gpu_lease.allocate", scope="run")
    for text in ("my_dag.gpu_lease", "my_dag.gpu_lease.allocate"):
        assert find(cluster_of(group), text).request is group


def test_a_full_id_is_nothing_else() -> None:
    """A lease may be called like another one's short id or task; each has an id of its own."""
    cluster = cluster_of(task(1), request(short_id(1)), request("my_dag.train"))
    for text in (short_id(1), "my_dag.train"):
        assert find(cluster, text).lease_id == text


@pytest.mark.parametrize("name", [short_id(1), "my_dag.train"])
def test_nobody_gives_a_lease_the_name_of_anothers(name: str) -> None:
    """Short ids follow one another, and the order is known: who stops that lease must not stop this one."""
    theirs, false = replace(task(1), owner="ada"), replace(request(name), owner="mallory")
    cluster = cluster_of(theirs, false)
    with pytest.raises(AmbiguousNameError) as raised:
        find(cluster, name)
    assert short_id(1) in str(raised.value).partition("names")[2]
    assert theirs.lease_id in str(raised.value) or name != short_id(1), "by what else would it be named"
    assert find(cluster, name, owner="ada").request is theirs
    assert find(cluster, name, owner="mallory").request is false
    called = replace(task(2), owner="mallory", lease_id="t", labels=RUNS | {"dag_id": "a", "task_id": "b"})
    own = replace(request("a.b"), owner="ada")
    assert find(cluster_of(called, own), "a.b", owner="ada").request is own


def test_where_several_have_a_name_they_are_listed_with_their_short_ids() -> None:
    cluster = cluster_of(*(task(run) for run in range(3, 7)), held=(task(1), task(2)))
    with pytest.raises(AmbiguousNameError) as raised:
        find(cluster, "my_dag.train")
    names = ", ".join(f"my_dag.train {short_id(number)}" for number in range(1, 5))
    assert str(raised.value) == f"'my_dag.train' names 6: {names} and 2 more; say which by its short id"


def test_what_is_not_found_is_told_with_what_is_alike() -> None:
    cluster = cluster_of(task(2), held=(task(1),))
    with pytest.raises(LeaseNotFoundError) as raised:
        find(cluster, "train", pending=False)
    assert str(raised.value) == f"no lease is called 'train'; alike: my_dag.train {short_id(1)}"
    with pytest.raises(LeaseNotFoundError, match=r"^no lease or pending request is called 'nobody'$"):
        find(cluster, "nobody")
    for number, pending, ends in ((1, True, "is a lease: release"), (2, False, "waits: cancel")):
        with pytest.raises(LeaseNotFoundError, match=f": my_dag.train {short_id(number)} {ends} ends it$"):
            find(cluster, short_id(number), pending=pending)


def test_what_has_another_fencing_token_is_not_said_to_be_gone() -> None:
    cluster = cluster_of(task(2), held=(task(1),))
    for number, is_held, what in ((1, True, "has another"), (2, False, "waits")):
        name = short_id(number)
        with pytest.raises(LeaseNotFoundError) as raised:
            find(cluster, name, fencing_token=99)
        error = raised.value
        assert str(error) == f"no lease is called {name!r} with fencing token 99: my_dag.train {name} {what}"
        assert (error.fencing_token, error.is_held) == (99, is_held)


def test_the_remainder_of_a_gang_is_found_by_its_short_id_unless_its_request_is_back() -> None:
    cluster = ClusterState(nodes("ab"))
    gang = Request("g", gpus=1, resources={"cpus": 1}, nodes=2)
    places = (Placement("a", (0,)), Placement("b", (0,)))
    cluster.apply(Granted(Lease(gang, places, 7, 0.0, sequence=5), 0.0))
    cluster.apply(MembersReleased("g", 7, (0,), 1.0))
    (remainder,) = cluster.remainders.values()
    assert find(cluster, short_id(5)) is find(cluster, "g") is remainder
    cluster.apply(Queued(gang, 0.0, 5, 2.0))
    assert find(cluster, short_id(5)) is cluster.pending["g"]
    assert find(cluster, short_id(5), pending=False) is remainder
    assert find(cluster, "g", fencing_token=7) is remainder
    cluster.apply(Granted(Lease(gang, (Placement("a", (1,)), Placement("b", (1,))), 8, 3.0, sequence=6), 3.0))
    assert find(cluster, short_id(5)) is remainder, "its task has asked again, which is another lease"
    assert find(cluster, "g") is cluster.leases["g"]
