"""Comparison of an inventory with a report."""

from __future__ import annotations

from resource_manager.agent.probe import gpu_of, server_report
from resource_manager.agent.report_format import Report, check_report
from resource_manager.core.models import Gpu
from resource_manager.fleet.comparison import Verdict, compare


def report(*gpus: tuple[int, str | None], lost: int | None = None, **known: object) -> Report:
    found = [gpu_of(index, uuid=uuid, type="A100", lost=index == lost, **known) for index, uuid in gpus]
    return check_report(server_report("nvml", "550", found, None))


def test_equal_sets_are_the_same_or_renumbered() -> None:
    inventory = [Gpu(0, "A100", uuid="GPU-a"), Gpu(1, uuid="GPU-b")]
    assert compare(inventory, report((0, "GPU-a"), (1, "GPU-b"))).verdict is Verdict.SAME
    turned = compare(inventory, report((0, "GPU-b"), (1, "GPU-a")))
    assert (turned.verdict, turned.in_words()) == (
        Verdict.RENUMBERED,
        "GPU 0 is now 1; GPU 1 is now 0",
    )
    assert compare([], report()).verdict is Verdict.SAME


def test_a_gpu_that_does_not_answer_is_missing() -> None:
    found = compare([Gpu(0, uuid="GPU-a")], report((0, "GPU-a"), lost=0))
    assert (found.verdict, found.missing) == (Verdict.DIFFERENT, {"GPU-a": 0})
    assert found.in_words() == "missing: GPU-a (GPU 0)"


def test_a_server_without_gpus_in_the_inventory_may_have_unknown_ones() -> None:
    assert compare([], report((0, "GPU-a"))).unknown == {"GPU-a": 0}


def test_types_and_memory_differ_only_where_both_say_something() -> None:
    pinned = [Gpu(0, "H100", memory_mib=81920, uuid="GPU-a")]
    found = compare(pinned, report((0, "GPU-a"), memory_mib=40960))
    assert (found.verdict, found.changed) == (
        Verdict.DIFFERENT,
        ("GPU-a: type A100, in the inventory H100", "GPU-a: memory_mib 40960, in the inventory 81920"),
    )
    assert compare([Gpu(0, uuid="GPU-a")], report((0, "GPU-a"), memory_mib=40960)).verdict is Verdict.SAME


def test_a_gpu_without_uuid_in_the_inventory_or_the_report() -> None:
    assert compare([Gpu(0), Gpu(1, uuid="GPU-b")], report((0, "GPU-a"))).verdict is Verdict.NOT_PINNED
    unnamed = compare([Gpu(0, uuid="GPU-a")], report((0, None)))
    assert (unnamed.verdict, unnamed.missing) == (Verdict.DIFFERENT, {"GPU-a": 0})
