"""Silence of agents as one observer counts it, on times of the test."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import pytest

from resource_manager.fleet.silence import LastReport, SilenceWatch

LOOK_S = 5


class Fleet:
    """Servers of which some report every `interval_s`, and an observer that looks every five seconds."""

    def __init__(self, *names: str, interval_s: float = 10.0) -> None:
        self.now = 1e6
        self.interval_s = dict.fromkeys(names, interval_s)
        self.reported_at = dict.fromkeys(names, self.now)
        self.down: set[str] = set()
        self.watch = SilenceWatch(60.0)
        self.lost: dict[str, float] = {}
        """When each server was lost that has not reported since."""

    def run(self, seconds: float) -> list[str]:
        """Let time pass; return the servers that are lost in it."""
        found: list[str] = []
        for _ in range(int(seconds // LOOK_S)):
            self.now += LOOK_S
            for name in self.reported_at.keys() - self.down:
                if self.now - self.reported_at[name] >= self.interval_s[name]:
                    self.reported_at[name] = self.now
                    self.lost.pop(name, None)
            agents = {
                name: LastReport(at, self.interval_s[name])
                for name, at in self.reported_at.items()
                if name not in self.lost
            }
            for name in self.watch.lost(agents, self.now):
                self.lost[name] = self.now
                found.append(name)
        return found

    def cut(self, names: Iterable[str]) -> None:
        self.down |= set(names)

    def mend(self, names: Iterable[str]) -> None:
        self.down -= set(names)


def test_one_of_two_is_not_over_half_and_is_lost_after_the_time() -> None:
    fleet = Fleet("a", "b")
    fleet.run(100)
    fleet.cut("a")
    assert fleet.run(50) == []
    assert fleet.run(15) == ["a"]
    assert fleet.run(600) == []
    fleet.mend("a")
    fleet.run(10)
    assert fleet.lost == {}


def test_servers_that_die_one_after_the_other_are_lost_one_after_the_other() -> None:
    fleet = Fleet(*"abcde")
    fleet.run(100)
    lost = []
    for name in "abc":
        fleet.cut(name)
        lost.append(fleet.run(150))
    assert lost == [["a"], ["b"], ["c"]]


def test_the_last_server_that_reports_is_over_half_of_them() -> None:
    """Nobody is left whose reports would show that the service can be reached."""
    fleet = Fleet("a", "b")
    fleet.run(100)
    fleet.cut("a")
    assert fleet.run(150) == ["a"]
    fleet.cut("b")
    assert fleet.run(600) == []
    assert fleet.watch.servers_held == 1


@pytest.mark.parametrize("down", ["abc", "abcde"])
def test_over_half_that_fall_silent_together_are_held_for_as_long_as_they_are_silent(down: str) -> None:
    fleet = Fleet(*"abcde")
    for place, name in enumerate("abcde"):  # their reports do not come at the same time
        fleet.reported_at[name] -= 2 * place
    fleet.run(100)
    fleet.cut(down)
    assert fleet.run(3600) == []
    assert fleet.watch.servers_held == len(down)
    fleet.mend(down)
    assert fleet.run(600) == []
    assert fleet.watch.servers_held == 0


def test_half_is_not_over_half() -> None:
    fleet = Fleet(*"abcd")
    fleet.run(100)
    fleet.cut("ab")
    assert sorted(fleet.run(100)) == ["a", "b"]


def test_once_half_of_those_held_report_the_others_count_from_then() -> None:
    fleet = Fleet(*"abcde")
    fleet.run(100)
    fleet.cut("abcd")
    fleet.run(300)
    fleet.mend("a")
    assert fleet.run(300) == []
    assert fleet.watch.servers_held == 3
    fleet.mend("b")
    assert fleet.run(55) == []
    assert sorted(fleet.run(25)) == ["c", "d"]


def test_a_server_that_dies_long_after_others_were_held_is_judged_without_them() -> None:
    fleet = Fleet(*"abcdefg")
    fleet.run(100)
    fleet.cut("abcd")
    fleet.run(600)
    fleet.cut("e")
    assert fleet.run(120) == ["e"]
    assert fleet.watch.servers_held == 4


def test_the_hold_is_said_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(*(f"s{number}" for number in range(10)))
    fleet.run(100)
    fleet.cut(fleet.reported_at)
    with caplog.at_level(logging.WARNING):
        fleet.run(900)
        fleet.mend({f"s{number}" for number in range(9)})
        fleet.run(10)
    assert [record.getMessage() for record in caplog.records] == [
        "over half of the watched servers fell silent together (s0, s1, s2, s3, s4, s5, s6, s7 and 2 more): "
        "this service or the network is the likely cause, so none of them is closed",
        "of 10 servers that fell silent together, 9 report again; still silent: s9",
    ]


def test_an_observer_that_has_just_started_or_paused_counts_from_then() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.cut("a")
    fleet.now += 3600
    assert fleet.run(60) == []
    assert fleet.run(10) == ["a"]
    fleet.cut("b")
    fleet.run(20)
    fleet.now += 45  # the observer stood still, and took no reports
    assert fleet.run(60) == []
    assert fleet.run(10) == ["b"]


def test_an_agent_that_reports_rarely_has_three_intervals_and_says_nothing_until_it_is_due() -> None:
    fleet = Fleet("a", "b", "c", "d", "e")
    fleet.interval_s.update(d=300.0, e=300.0)
    fleet.run(600)
    fleet.cut("abcde")
    assert fleet.run(250) == [], "three of the three that could have been heard"
    fleet.mend("abce")
    fleet.run(100)
    assert fleet.run(400) == []
    assert fleet.run(300) == ["d"]


def test_servers_that_fell_silent_together_may_report_again_after_the_clock_was_set_back() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.run(100)
    fleet.cut(("a", "b"))
    assert fleet.run(100) == []
    assert fleet.watch.servers_held == 2
    fleet.now -= 3600
    fleet.reported_at = dict.fromkeys(fleet.reported_at, -math.inf)  # those of times to come count as unknown
    fleet.mend(("a", "b"))
    assert fleet.run(30) == []
    assert fleet.watch.servers_held == 0
    fleet.cut("c")
    assert fleet.run(80) == ["c"]
