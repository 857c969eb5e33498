"""The estimate of a server's clock, and what of its changes is a jump."""

from __future__ import annotations

import pytest

from resource_manager.storage.clock import MAX_AGE_S, MAX_SAFETY_S, Reading, ServerClock
from tests.builders import Clock

DAY_S = 86_400.0


class Server:
    """A server's clock, asked over a way of `takes_s` there and `takes_s` back."""

    def __init__(self, steady: Clock) -> None:
        self.steady = steady
        self.ahead_s = 5_000.0
        self.takes_s = 0.001
        self.way_back_s: float | None = None

    def ask(self) -> float:
        self.steady.now += self.takes_s
        told = self.steady.now + self.ahead_s
        self.steady.now += self.takes_s if self.way_back_s is None else self.way_back_s
        return told


@pytest.fixture
def steady() -> Clock:
    return Clock()


@pytest.fixture
def server(steady: Clock) -> Server:
    return Server(steady)


@pytest.fixture
def clock(server: Server, steady: Clock) -> ServerClock:
    clock = ServerClock(server.ask, steady)
    clock.now()
    return clock


def look(clock: ServerClock, server: Server) -> None:
    begin = server.steady()
    clock.learn(server.ask(), begin)


def test_the_server_is_asked_again_after_a_while(clock: ServerClock, server: Server, steady: Clock) -> None:
    assert clock.now() == pytest.approx(steady.now + 5_000.0)
    server.ahead_s = 5_001.0
    assert clock.now() == pytest.approx(steady.now + 5_000.0)
    steady.now += MAX_AGE_S + 1
    assert clock.now() == pytest.approx(steady.now + 5_001.0)


@pytest.mark.parametrize("seconds", [6.0, -6.0, 3600.0, -3600.0])
def test_a_jump_is_seen_with_the_time_before_it(clock: ServerClock, server: Server, seconds: float) -> None:
    server.steady.now += 10
    server.ahead_s += seconds
    before = server.steady.now + server.ahead_s - 10
    look(clock, server)
    assert clock.jump is not None
    assert clock.jump.seconds == pytest.approx(seconds, abs=0.01)
    assert clock.jump.since == pytest.approx(before, abs=0.01)
    seen = clock.jump
    server.steady.now += 10
    look(clock, server)
    assert clock.jump is seen, "once"


def test_a_reading_from_before_the_other_shows_no_jump() -> None:
    """Another process of the machine may have seen it since."""
    before, after = Reading(10.0, 5_000.0, 0.1), Reading(12.0, 8_600.0, 0.2)
    assert before.jump_since(after) is None
    jump = after.jump_since(before)
    assert jump is not None
    assert jump.seconds == pytest.approx(3600.0)


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
@pytest.mark.parametrize(("there_s", "back_s"), [(0.0, 0.4), (0.4, 0.0), (0.2, 0.2)])
def test_slow_answers_date_no_jump_after_the_time_at_which_another_machine_may_have_seen_it(
    clock: ServerClock, server: Server, there_s: float, back_s: float, seconds: float
) -> None:
    """Else the two did not see the same one, and grants pause for neither."""
    server.takes_s, server.way_back_s = 0.0, 0.4
    look(clock, server)
    server.ahead_s += seconds
    seen_by_other = server.steady.now - 0.4 + server.ahead_s  # while the last answer was on its way back
    server.takes_s, server.way_back_s = there_s, back_s
    look(clock, server)
    assert clock.jump is not None
    assert clock.jump.is_known(seconds, seen_by_other)


def test_a_step_of_a_few_seconds_is_followed_in_silence(clock: ServerClock, server: Server) -> None:
    server.ahead_s += 4.9
    look(clock, server)
    assert clock.jump is None
    assert clock.now() == pytest.approx(server.steady.now + server.ahead_s, abs=0.1)


def test_a_leap_smear_and_a_clock_that_is_slewed_are_no_jumps(clock: ServerClock, server: Server) -> None:
    for rate in (1 / DAY_S, 5e-4):
        for pause_s in (0.5, 10.0, 3600.0, DAY_S):
            server.steady.now += pause_s
            server.ahead_s += rate * pause_s
            look(clock, server)
    assert clock.jump is None


def test_a_slow_answer_is_no_jump(clock: ServerClock, server: Server) -> None:
    """Its time may be that of its begin or of its end."""
    for there_s, back_s in ((20.0, 0.0), (0.0, 20.0), (20.0, 0.0), (0.0, 0.001)):
        server.takes_s, server.way_back_s = there_s, back_s
        look(clock, server)
    assert clock.jump is None


@pytest.mark.parametrize(("there_s", "back_s"), [(0.4, 0.0), (0.0, 0.4), (0.2, 0.2), (0.5, 0.0)])
def test_an_estimate_is_never_ahead_of_the_servers_clock(
    clock: ServerClock, server: Server, there_s: float, back_s: float
) -> None:
    """Else a lease expires, and its GPU is granted, before its end as its owner sees it."""
    server.takes_s, server.way_back_s = there_s, back_s
    look(clock, server)
    true = server.steady.now + server.ahead_s
    assert true - 2 * MAX_SAFETY_S <= clock.now() <= true + 1e-6


def test_an_answer_to_an_older_question_of_another_thread_tells_nothing(
    clock: ServerClock, server: Server
) -> None:
    server.steady.now += 1
    begin, told = server.steady.now, server.steady.now + server.ahead_s
    server.steady.now += 1
    server.ahead_s += 3600
    look(clock, server)
    forward = clock.jump
    clock.learn(told, begin)
    assert clock.jump is forward
    assert forward is not None
    assert clock.now() == pytest.approx(server.steady.now + server.ahead_s, abs=0.1)
