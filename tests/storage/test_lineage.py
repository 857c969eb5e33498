"""What a store remembers of the commits behind its replicas."""

from __future__ import annotations

from resource_manager.storage.lineage import KEPT, NO_COMMIT, Lineage


def test_the_first_note_of_a_version_stays_and_those_of_another_incarnation_are_others() -> None:
    lineage = Lineage()
    lineage.note("a", 7, "first")
    lineage.note("a", 7, "second")
    lineage.note("a", 8, "")
    assert [lineage.id_of("a", version) for version in (6, 7, 8)] == ["", "first", NO_COMMIT]
    assert lineage.id_of("b", 7) == ""


def test_what_no_replica_asks_for_is_forgotten_first() -> None:
    lineage = Lineage()
    for version in range(KEPT):
        lineage.note("a", version, f"of {version}")
    assert lineage.id_of("a", 0) == "of 0"
    lineage.note("a", KEPT, "one more")
    assert [bool(lineage.id_of("a", version)) for version in (0, 1, 2, KEPT)] == [True, False, True, True]
