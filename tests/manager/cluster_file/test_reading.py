"""Cluster files: sections joined from several files, and one line with file, line and column for a fault."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import ClusterSettings, HealthRule
from resource_manager.errors import ClusterFileError
from resource_manager.manager.cluster_file.positions import Positions, dotted, location_of
from resource_manager.manager.cluster_file.reading import ClusterFiles
from resource_manager.manager.cluster_file.writing import sections_of, to_toml
from resource_manager.storage.codec import snapshot_from_dict, snapshot_to_dict

SERVERS = '[[servers]]\nname = "a"\ngpus = 2\ncpus = 8\n'
SIGN_ON = """[sign_on]
issuer = "https://login.example.org/lab"
client_id = "gpu-manager"
scopes = ["openid"]
token_life = 43200.0
[sign_on.groups.gpu-users]
role = "user"
teams = ["vision", "nlp"]
[sign_on.groups."ops, all"]
role = "operator"
"""


def read(folder: Path, *texts: str) -> ClusterFiles:
    paths = [folder / f"{number}.toml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return ClusterFiles(paths)


def test_a_byte_order_mark_and_line_ends_of_windows_are_read(tmp_path: Path) -> None:
    windows = "\ufeff" + SERVERS.replace("\n", "\r\n")
    assert read(tmp_path, windows).definition == read(tmp_path, SERVERS).definition


def fault(folder: Path, *texts: str) -> str:
    """Return the error of the files, without their folder."""
    with pytest.raises(ClusterFileError) as caught:
        read(folder, *texts)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{folder}/", "")


def test_a_section_is_whole_and_one_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    found = read(tmp_path, '[cluster]\norder = "fifo"\nlease_ttl = "12h"\n').definition
    assert found.settings == ClusterSettings(order="fifo", lease_ttl_s=43_200.0)
    assert (found.nodes, found.teams, found.windows, found.health) == (None, None, None, None)


def test_several_files_are_read_as_one(tmp_path: Path) -> None:
    more = '[health]\n"xid 63" = "note"\n' + SERVERS.replace('"a"', '"b"')
    found = read(tmp_path, SERVERS, more).definition
    assert [(node.name, node.server_id) for node in found.nodes or ()] == [("a", 0), ("b", 1)]
    assert found.health == (HealthRule("xid 63", "note"),)


@pytest.mark.parametrize("section", ["cluster", "teams", "health"])
def test_a_section_that_is_empty_says_nothing_and_is_named(tmp_path: Path, section: str) -> None:
    found = read(tmp_path, f"[{section}]\n").definition
    assert (found.settings, found.teams, found.health) == (None, None, None)
    assert found.empty == (section,)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["[cluster]\npolicy = 'x'\norder 3\n"], "0.toml:3:7: not TOML: Expected '=' after a key"),
        (["[cluster]\n\n  colour = 'red'\n"], "0.toml:3:3: cluster.colour: is not a key of this file"),
        (["[cluster]\nlease_ttl = 'soon'\n"], "0.toml:2:1: cluster.lease_ttl: must be seconds or a text"),
        (["[cluster]\nmin_gpus = 9\nmax_gpus = 8\n"], "0.toml:1:1: cluster: min_gpus (9) is above max_gpus"),
        ([SERVERS, SERVERS], "1.toml:1:1: server name 'a' is used twice"),
        (["[cluster]\norder = 'fifo'\n", "\n[cluster]\n"], "1.toml:2:1: cluster: "),
        (["[teams.a]\nlimit = 1\n", "preemption = true\n"], "1.toml:1:1: preemption: "),
        ([SERVERS, f"# b\n{SERVERS.replace('cpus = 8', 'cpus = -8')}"], "1.toml:5:1: servers.1.cpus: "),
        (["servers = [ {name = 'a', cpus = 1},\n  {name = 'b', cpus = 'x'} ]\n"], "0.toml:2:16: servers.1"),
        (["[health]\n'xid 1' = 'explode'\n"], '0.toml:2:1: health."xid 1": must be '),
        (["[[maintenance]]\nservers = ['a']\nfrom = 'x'\n"], "0.toml:3:1: maintenance.0.from: "),
        (["x = 1\n"], "0.toml:1:1: x: is not a key of this file"),
        ([SIGN_ON.replace("https", "http")], "0.toml:2:1: sign_on.issuer: must begin with https://"),
        (
            [SIGN_ON.replace("issuer", "isuer")],
            "0.toml:2:1: sign_on.isuer: is not a key of this file: did you",
        ),
        (
            ["\n[[server]]\nname = 'a'\n"],
            "0.toml:2:1: server: is not a key of this file: did you mean servers?",
        ),
        (
            [SERVERS.replace("cpus", "cpu")],
            "0.toml:4:1: servers.0.cpu: is not a key of this file: did you mean cpus?",
        ),
        (["[[servers]]\nname = 'a'\n"], "0.toml:1:1: servers.0.cpus: Field required"),
        ([SIGN_ON.replace('"user"', '"root"')], "0.toml:7:1: sign_on.groups.gpu-users.role: must be "),
        ([SIGN_ON.replace('["openid"]', "[]")], "0.toml:4:1: sign_on.scopes: must contain openid"),
        ([SERVERS.replace("gpus = 2", "gpus = true")], "0.toml:3:1: servers.0.gpus: must be a valid integer"),
        (["[cluster]\nidle_below = true\n"], "0.toml:2:1: cluster.idle_below: must be a valid number"),
        (["[cluster]\nidle_below = nan\n"], "0.toml:2:1: cluster.idle_below: must be a finite number"),
        (
            ["[cluster]\nwritable = '/data'\n"],
            "0.toml:2:1: cluster.writable: must be a valid list, got '/data'",
        ),
        (["[teams.a]\nweight = true\n"], "0.toml:2:1: teams.a.weight: must be a valid number"),
        (['{"servers": []}'], "0.toml:1:1: not TOML: "),
        ([SIGN_ON.split("[sign_on.groups", 1)[0]], "0.toml:1:1: sign_on.groups: "),
    ],
)
def test_a_fault_is_one_line_with_its_place(tmp_path: Path, texts: list[str], said: str) -> None:
    assert fault(tmp_path, *texts).startswith(said)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_bytes(b"\xff")
    for name, reason in (("a.toml", "No such file or directory"), ("b.toml", "not UTF-8 text")):
        with pytest.raises(ClusterFileError, match=f"{name}: {reason}$"):
            ClusterFiles([tmp_path / name])


def test_the_sign_on_is_written_as_it_was_read(tmp_path: Path) -> None:
    stated = read(tmp_path, SIGN_ON).definition.sign_on
    assert stated is not None
    assert [(each.group, each.role, each.teams) for each in stated.groups] == [
        ("gpu-users", "user", ("vision", "nlp")),
        ("ops, all", "operator", ()),
    ]
    assert (stated.token_life_s, stated.groups_claim) == (43_200.0, "groups")
    cluster = ClusterState([])
    cluster.settings = ClusterSettings(sign_on=stated)
    stored = ClusterState.from_snapshot(snapshot_from_dict(snapshot_to_dict(cluster.snapshot())))
    text = to_toml(sections_of(stored))
    assert tomllib.loads(text) == tomllib.loads(SIGN_ON)
    assert read(tmp_path, text).definition.sign_on == stated


KEYS = st.text(min_size=1, max_size=4)
VALUES = st.recursive(
    st.booleans() | st.integers(-99, 99) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, each in inner for place in [(*path, key), *leaves(each, (*path, key))]]


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_whatever_is_written_is_read_again_and_every_part_of_it_has_a_place(table: dict[str, Any]) -> None:
    text = to_toml(table)
    assert tomllib.loads(text) == table
    lines = text.split("\n")
    found = Positions(text)
    for path in leaves(table):
        line, column = found.of(path)
        assert 1 <= line <= len(lines)
        assert 1 <= column <= len(lines[line - 1])
        assert location_of(dotted(path)) == tuple(
            int(part) if str(part).isdecimal() else part for part in path
        )


NESTED = """# words
a = "[t] # none"
[b.'c d']
e = 1979-05-27 07:32:00Z
[b]
  f = [ 1,
    '''two
'''] # end
[[t]]
x = 1
[[t]]
[t.u]
y.z = { k = 1 }
"""


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (("a",), (2, 1)),
        (("b", "c d", "e"), (4, 1)),
        (("b", "f"), (6, 3)),
        (("b", "f", 1), (7, 5)),
        (("t", 0, "x"), (10, 1)),
        (("t", 1, "z"), (11, 1)),
        (("t", 1, "u", "y", "z", "k"), (13, 9)),
        (("nowhere",), (1, 1)),
    ],
)
def test_a_place_is_that_of_the_key_or_of_the_innermost_table(
    path: tuple[str | int, ...], place: tuple[int, int]
) -> None:
    assert tomllib.loads(NESTED)
    assert Positions(NESTED).of(path) == place
