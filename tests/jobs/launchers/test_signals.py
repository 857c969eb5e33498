"""Standing look at the jobs of a place: it tells of ends and of output, over ssh by one connection."""

import os
import signal
from contextlib import closing

import pytest

from resource_manager.jobs.launchers import LauncherUnreachableError
from resource_manager.jobs.launchers.registry import has_signals, open_signals
from tests.eventually import wait_for


@pytest.fixture
def place_of(launcher):
    """Return a function that prepares and starts a job, and returns its place."""

    def begin(job):
        place = launcher.prepare(job)
        if not has_signals(place):
            pytest.skip(f"jobs of {place.launcher} are looked at one by one")
        launcher.start(job)
        return place

    return begin


def told(signals):
    """Return the jobs that are told of next."""
    return wait_for(lambda: signals.changed(0.2) - {""}, 20.0)


def test_ends_and_output_are_told_and_nothing_of_what_is_forgotten(launcher, job, place_of, tmp_path):
    goes_on, prints = (tmp_path.with_name(f"{tmp_path.name}-{name}") for name in ("goes-on", "prints"))
    waits = f"until [ -e {goes_on} ]; do sleep 0.05; done"
    seen = {"container": {"binds": [f"{tmp_path.parent}:{tmp_path.parent}"]}}
    first = job(f"until [ -e {prints} ]; do sleep 0.05; done; echo line; {waits}; exit 3", **seen)
    second, forgotten = job(waits, **seen), job(waits, **seen)
    place = place_of(first)
    for other in (second, forgotten):
        assert place_of(other) == place
    with closing(open_signals(place)) as signals:
        for each in (first, second, forgotten):
            signals.watch(each.key)
        signals.forget(forgotten.key)
        prints.touch()
        assert told(signals) == {first.key}
        goes_on.touch()
        ended = told(signals)
        while ended != {first.key, second.key}:
            ended |= told(signals)
        assert launcher.status(first.key).exit_code == 3


def test_a_job_that_is_killed_or_removed_has_ended(launcher, job, place_of, tmp_path):
    killed, removed = job("exec sleep 60"), job("exec sleep 60")
    place = place_of(killed)
    place_of(removed)
    with closing(open_signals(place)) as signals:
        signals.watch(killed.key)
        if place.launcher == "docker":
            launcher._engine.api.kill(killed.key)
        else:
            os.killpg(int((tmp_path / killed.key / "group").read_text()), signal.SIGKILL)
        assert told(signals) == {killed.key}
        signals.forget(killed.key)  # an engine may tell of it once more
        signals.watch(removed.key)
        launcher.stop(removed.key, grace_s=0)
        assert told(signals) == {removed.key}


def test_a_place_that_is_gone_is_an_error(launcher, job, place_of, tmp_path):
    place = place_of(job("true"))
    if place.launcher == "docker":
        pytest.skip("an engine has no folder: see test_docker_engine.py")
    mark = (tmp_path / "mark").read_text()
    (tmp_path / "mark").write_text("another folder")
    with (
        pytest.raises(LauncherUnreachableError, match="another one"),
        closing(open_signals(place)) as signals,
    ):
        told(signals)
    (tmp_path / "mark").write_text(mark)
