"""Lists of the console: leases and the queue, all or one's own."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path

from flask.testing import FlaskClient

import resource_manager.rest.console
from resource_manager import GPUResourceManager
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.rest.console.forms import PER_PAGE
from resource_manager.rest.tokens import Role

AsRole = Callable[..., FlaskClient]
TEMPLATES = Path(resource_manager.rest.console.__file__).parent / "templates"


def text_of(client: FlaskClient, path: str) -> str:
    return client.get(path).get_data(as_text=True)


def test_mine_are_those_of_the_caller(manager: GPUResourceManager, as_role: AsRole) -> None:
    ada = as_role(Role.USER, "ada")
    for server, owner in enumerate(["ada", "bob", "bob", "bob"]):
        manager.submit(f"held-by-{owner}-{server}", 8, owner=owner, server=server)
    for owner in ("ada", "bob"):
        manager.submit(f"asked-by-{owner}", 8, owner=owner)
    for path, begin in (("/leases", "held-by-"), ("/queue", "asked-by-")):
        [everyone, mine] = [text_of(ada, path + query) for query in ("", "?mine=true")]
        main = mine.partition('id="list"')[2]
        assert begin + "bob" in everyone
        assert (begin + "ada" in main, begin + "bob" in main) == (True, False), path
    assert "<p>1 lease</p>" in text_of(ada, "/leases?mine=true")
    assert "<p>2 pending requests</p>" in text_of(ada, "/queue")
    assert "1 GPU<" not in text_of(ada, "/queue")


def test_a_list_leads_to_the_dialog_of_the_page_that_asks(
    manager: GPUResourceManager, as_role: AsRole
) -> None:
    ada = as_role(Role.USER, "ada")
    for server, owner in enumerate(["ada", "bob", "bob", "bob"]):
        manager.submit(f"train-{owner}-{server}", 8, owner=owner, server=server)
    manager.submit("wait-ada", 8, owner="ada")
    manager.submit("wait-bob", 8, owner="bob")
    for path, dialog in (("/leases", "stop"), ("/queue", "cancel")):
        links = re.findall(r'href="([^"]+)" data-ask="(\w+)"', html.unescape(text_of(ada, path)))
        assert [name for _, name in links] == [dialog], path  # none of bob's
        assert f'<div popover id="{dialog}"' in text_of(ada, links[0][0])


def current_part(page: str) -> str:
    """Return the part of a page that its script replaces while the page is open."""
    begin = page.index('<div id="list" data-fragment=')
    depth = 0
    for found in re.finditer(r"<(/?)div\b", page[begin:]):
        depth += -1 if found[1] else 1
        if not depth:
            return page[begin : begin + found.start()]
    raise AssertionError("it has no end")


def test_the_pages_of_a_list_are_as_current_as_the_list(manager: GPUResourceManager, as_role: AsRole) -> None:
    servers = [{"name": "s-{id}", "count": PER_PAGE + 1, "gpus": 8, "cpus": 1000}]
    manager.apply(ClusterForm.model_validate({"servers": servers}))
    for number in range(PER_PAGE + 1):
        manager.submit(f"part-{number}", 1, server="s-0", gpu_milli=10)
    for number in range(PER_PAGE + 1):
        manager.submit(f"waits-{number}", 8, server="s-0")
    reader = as_role(Role.READER)
    for path in ("/", "/leases", "/queue", "/timeline"):
        page = text_of(reader, path)
        assert "Page 1 of 2" in current_part(page), path
        assert page.count("Page 1 of 2") == 1, path


def test_a_page_says_what_time_it_is_by_which_ages_are_reckoned(as_role: AsRole) -> None:
    for path in ("/", "/leases", "/queue"):
        found = re.search(r'<body [^>]*data-now="([\d.]+)"', text_of(as_role(Role.READER), path))
        assert found is not None, path
        assert float(found[1]) > 1e9


def test_a_time_to_come_begins_with_its_in() -> None:
    """The script of the pages writes `in 5 min` into each of them, as time goes on."""
    texts = [path.read_text(encoding="utf-8") for path in TEMPLATES.glob("*.html")]
    times = [found for text in texts for found in re.findall(r"<time data-until=[^>]*>(...)", text)]
    assert set(times) == {"in "}


def test_a_name_from_right_to_left_turns_nothing_beside_it(
    manager: GPUResourceManager, as_role: AsRole
) -> None:
    manager.submit("אימון", 2)
    assert "<bdi>אימון</bdi></a> <code>" in text_of(as_role(Role.READER), "/leases")


def test_a_small_part_of_a_gpu_is_not_shown_as_none(manager: GPUResourceManager, as_role: AsRole) -> None:
    manager.submit("tiny", 1, gpu_milli=4)
    reader = as_role(Role.READER)
    assert "(0.4% of it)" in text_of(reader, "/leases")
    assert "; 99.6% free" in text_of(reader, "/")
