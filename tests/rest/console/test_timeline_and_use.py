"""Timeline and use: what they draw is what the history says, with every name escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator

import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.core.models import Gpu, Node
from resource_manager.core.names import short_id
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.rest.console.use_page import top_of
from resource_manager.rest.tokens import Role
from resource_manager.storage.memory import MemoryStore
from tests.builders import Clock

AsRole = Callable[..., FlaskClient]

NODE = Node("s0", 0, {"cpus": 64}, tuple(Gpu(i, "A100") for i in range(8)))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def manager(clock: Clock) -> Iterator[GPUResourceManager]:
    """One failed, one running and one pending task; each of an hour."""
    with GPUResourceManager(store=MemoryStore(clock=clock), inventory=[NODE], by="ada") as manager:
        manager.submit("d/r/<old>", 2, team="nlp<b>")
        clock.now += 3600
        manager.release("d/r/<old>", outcome="FAILED", reason="exit code 3")
        manager.submit("d/r/now", 8, team="vision", expected_runtime=7200)
        manager.submit("d/r/next", 4, expected_runtime=600)
        clock.now += 3600
        yield manager


def page(as_role: AsRole, path: str) -> str:
    response = as_role(Role.READER).get(path)
    assert response.status_code == 200
    return response.get_data(as_text=True)


def bars(text: str, kind: str) -> list[tuple[float, float, str]]:
    """Return place, width and title of the bars whose classes match."""
    found = re.findall(
        rf'<svg class="{kind}" x="([\d.]+)%" y="\d+" width="([\d.]+)%" height="\d+"><title>(.*?)</title>',
        text,
    )
    return [(float(x), float(width), html.unescape(title)) for x, width, title in found]


def test_the_timeline_has_past_running_and_coming_leases(as_role: AsRole) -> None:
    text = page(as_role, "/timeline")
    assert "<old>" not in text
    [(x, width, title)] = bars(text, "past failed")
    assert (title, x < 2) == (f"d/r/<old> {short_id(1)}: FAILED, 1.0 h, exit code 3, by ada", True)
    [(start, running, title)] = bars(text, "held [a-z0-9 ]*?(?<!later)")
    assert title == f"d/r/now {short_id(2)}: running, 1.0 h"
    assert (start, running) == pytest.approx((x + width, width), abs=0.1)
    [(_, _, title)] = bars(text, "held [a-z0-9 ]*later")
    assert title.startswith(f"d/r/now {short_id(2)}: expected to end, ")
    [(_, _, title)] = bars(text, "expected")
    assert title == f"d/r/next {short_id(3)}: should start in 1.0 h (54 min to 1.1 h, few data)"


def test_the_timeline_marks_every_end(as_role: AsRole, manager: GPUResourceManager) -> None:
    manager.release("d/r/now", outcome="CANCELLED")
    manager.release("d/r/next", outcome="SUCCESS", reason="exit code 0")
    text = page(as_role, "/timeline")
    [(_, _, stopped)] = bars(text, "past stopped")
    assert stopped.endswith(": CANCELLED, 1.0 h, by ada")
    [(_, _, well)] = bars(text, "past")
    assert well.endswith("exit code 0, by ada")
    assert text.count('<line x1="100%" x2="100%" y2="100%"/>') == 3
    for mark in ("✖ nlp&lt;b&gt; / d/r/&lt;old&gt;", "■ vision / d/r/now"):
        assert mark in text


def test_the_timeline_has_a_bounded_number_of_bars(
    as_role: AsRole, manager: GPUResourceManager, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each open page asks for all of them at each change."""
    monkeypatch.setattr("resource_manager.rest.console.timeline.MAX_ENDED", 2)
    manager.release("d/r/now", outcome="SUCCESS")
    assert "are shown" not in page(as_role, "/timeline")
    clock.now += 60
    manager.release("d/r/next", outcome="SUCCESS")
    text = page(as_role, "/timeline")
    assert [title.split()[0] for _, _, title in bars(text, "past[a-z ]*")] == ["d/r/now", "d/r/next"]
    note = "Of the leases that have ended the last 2 are shown, those of several servers once for each"
    assert f"{note}." in text, "there is no other server to search for"
    servers = [{"name": name, "gpus": 8, "gpu_type": "A100", "cpus": 64} for name in ("s0", "s1")]
    manager.apply(ClusterForm.model_validate({"servers": servers}))
    assert f"{note}: search for a server to see its earlier ones." in page(as_role, "/timeline")


def test_an_empty_timeline_says_the_next_step(
    as_role: AsRole, manager: GPUResourceManager, clock: Clock
) -> None:
    manager.cancel("d/r/next")
    manager.release("d/r/now")
    clock.now += 10 * 3600
    assert "No lease in this time." in page(as_role, "/timeline?hours=1")


def test_a_timeline_of_no_server_says_so(as_role: AsRole) -> None:
    """With a request that waits there was an empty chart and no word, else advice that did not help."""
    text = page(as_role, "/timeline?q=nosuch")
    assert ("No server matches." in text, "No lease in this time." in text) == (True, False)
    assert "No server matches." not in page(as_role, "/timeline?q=now")


def test_use_names_who_wasted_most_and_adds_up(as_role: AsRole) -> None:
    raw = page(as_role, "/use?by=team&days=1")
    assert "<b>" not in raw.replace("<body", "")
    text = html.unescape(raw)
    assert "<strong>nlp<b></strong> wasted most: 2.0 of 2.0 GPU-hours (2.0 failed)." in text
    total = text[text.index('<tr class="sum">') :]
    amounts = [float(amount) for amount in re.findall(r">([\d.]+)</td>", total)]
    granted, *parts = amounts[:7]
    assert granted == sum(parts) == 10.0
    assert "gpu_type" in page(as_role, "/use?by=gpu_type")
    assert as_role(Role.READER).get("/use?by=colour").status_code == 400


def test_what_a_table_of_tenths_shows_as_nothing_wasted_nothing(
    as_role: AsRole, manager: GPUResourceManager, clock: Clock
) -> None:
    manager.release("d/r/now")
    clock.now += 24 * 3600
    manager.submit("d/r/short", 1, team="audio")
    clock.now += 60
    manager.release("d/r/short", outcome="FAILED")
    text = page(as_role, "/use?by=team&days=1")
    assert "audio" in text
    assert "Nothing is known to be wasted." in text


def test_estimates_are_shown_with_what_came_true(as_role: AsRole, manager: GPUResourceManager) -> None:
    assert "No request that waited has started yet" in page(as_role, "/estimates")
    manager.submit("d/r/<last>", 8)
    for ends, comes in (("d/r/now", "d/r/new"), ("d/r/next", "d/r/newer")):
        manager.queue()
        manager.release(ends)
        manager.submit(comes, 8)
    manager.queue()
    text = page(as_role, "/estimates")
    assert re.search(r"&lt;last&gt; \w{4}</bdi></a></td><td ", text), "called as on every other page"
    assert re.search(r'>all</td><td data-label="Estimates">2</td><td data-label="Inside">\d+ %</td>', text)


def test_use_of_nothing_says_the_next_step(
    as_role: AsRole, manager: GPUResourceManager, clock: Clock
) -> None:
    manager.cancel("d/r/next")
    manager.release("d/r/now")
    clock.now += 3 * 86_400
    assert "No GPU was granted in this time." in page(as_role, "/use?days=1")


def test_the_chart_of_use_begins_at_the_first_lease_and_says_when(as_role: AsRole) -> None:
    text = page(as_role, "/use?by=team&days=7")
    assert "UTC, 2.0 h ago: the first lease in this time" in text
    widths = {
        float(width)
        for width in re.findall(r'<rect class="k-\w+" x="[\d.]+%" y="[\d.]+" width="([\d.]+)%"', text)
    }
    assert widths == {1.6}, "a minute of data is no block of seven days"
    assert "<span>8 GPUs</span><span>4</span><span>0</span>" in text


@pytest.mark.parametrize(
    ("gpus", "top"), [(0.0, 1), (0.3, 1), (1.0, 1), (7.1, 8), (8.1, 10), (28.0, 30), (1000, 1000)]
)
def test_the_axis_of_use_ends_at_a_round_number(gpus: float, top: float) -> None:
    assert top_of(gpus) == top


def test_a_hold_that_ended_on_time_ended_well(
    as_role: AsRole, manager: GPUResourceManager, clock: Clock
) -> None:
    for name in ("d/r/now", "d/r/next"):
        manager.release(name)
    manager.submit("hand:ada@desk/0123abcd", 1, ttl=60)
    clock.now += 61
    manager.expire_and_schedule()
    text = page(as_role, "/timeline")
    [title] = [title for _, _, title in bars(text, "past") if "ada@desk" in title]
    assert "ended on time, 6" in title
    assert not [title for _, _, title in bars(text, "past failed") if "ada@desk" in title]


def test_a_bar_leads_to_its_own_lease_also_where_its_id_has_another_by_now(
    as_role: AsRole, manager: GPUResourceManager
) -> None:
    manager.release("d/r/now")
    manager.release("d/r/next")
    manager.submit("d/r/<old>", 2)
    text = page(as_role, "/timeline")
    links = re.findall(r'<a href="([^"]*)" aria-label="d/r/&lt;old&gt;[^"]*: (\w+),', text)
    is_over = {end: "ENDED" in page(as_role, html.unescape(link)) for link, end in links}
    assert is_over == {"FAILED": True, "running": False}
