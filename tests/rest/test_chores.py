"""What a service does regularly."""

from __future__ import annotations

import threading

from resource_manager.rest.chores import regularly


def test_what_a_service_does_regularly_goes_on_after_an_error_of_any_kind() -> None:
    calls, stop, again = [], threading.Event(), threading.Event()

    def work() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("a bug")
        again.set()

    thread = regularly("expiry", 0.01, work, stop)
    assert again.wait(30)
    stop.set()
    thread.join()
