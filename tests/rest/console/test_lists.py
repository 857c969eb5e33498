"""Lists of the console: leases and the queue, all or one's own."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.rest.tokens import Role

AsRole = Callable[..., FlaskClient]


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
