"""Colours of leases: distinct, constant, and never like an alarm."""

from __future__ import annotations

import colorsys
import math
import re
from itertools import combinations
from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager.rest.console import colours
from resource_manager.rest.console.colours import HALF, HUES, LEVELS, Colour, Holder, assign

EVERY = [Colour(hue, level, pale) for hue in range(HUES) for level in range(LEVELS) for pale in (False, True)]
CSS = Path(colours.__file__).parent / "static" / "console.css"
INKS = dict(re.findall(r"\.v(\d+) \{ --l: [\d.]+; --ink: (#ffffff|#000000); \}", CSS.read_text()))


def channels(colour: Colour) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(colour.rgb[1:])
    return red, green, blue


def ink_on(colour: Colour) -> str:
    """Return the colour of text on this one, white or black."""
    return INKS[str(colour.level)]


def cluster(random: Random, servers: int) -> list[Holder]:
    """Return leases that may exist at the same time: with distinct tokens and distinct GPUs."""
    found: list[Holder] = []
    tokens = random.sample(range(10**6), 8 * servers)
    for server_id in random.sample(range(servers), random.randint(0, servers)):
        first = 0
        while first < 8:
            count = random.randint(1, 8 - first)
            if random.random() < 0.7:
                name = f"{server_id}/{first}"
                gpu_ids = tuple(range(first, first + count))
                found.append(Holder(name, server_id, gpu_ids, 1000, tokens[len(found)]))
            first += count
    return found


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_lease_keeps_its_colour_while_others_start_and_end(seed: int) -> None:
    random = Random(seed)
    leases = cluster(random, servers=128)
    all_of_them = assign(leases)
    assert len({colour.rgb for colour in all_of_them.values()}) == len(leases)
    left = random.sample(leases, random.randint(0, len(leases)))
    assert assign(left) == {lease.lease_id: all_of_them[lease.lease_id] for lease in left}


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 40), st.booleans()), max_size=300), st.data())
@settings(max_examples=30, deadline=None)
def test_colours_are_distinct_and_a_later_lease_never_changes_an_earlier_one(
    places: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    """Leases with any server and GPU ids, GPU fractions among them, or no GPU."""
    leases = [
        Holder(f"t{token}", server, (gpu,) if gpu else (), 500 if part else 1000, token * 211)
        for token, (server, gpu, part) in enumerate(places)
    ]
    found = assign(leases)
    assert len({colour.rgb for colour in found.values()}) == len(leases)
    older = leases[: data.draw(st.integers(0, len(leases)))]
    assert assign(older) == {lease.lease_id: found[lease.lease_id] for lease in older}


def test_as_many_leases_as_colours_are_distinct_and_more_still_get_one() -> None:
    leases = [Holder(f"t{i}", i, (0,), 1000, i) for i in range(2 * HALF)]
    assert len(set(assign(leases).values())) == 2 * HALF
    assert len(assign([*leases, Holder("one more", 0, (1,), 1000, 9999)])) == 2 * HALF + 1


def test_every_colour_has_its_own_rgb_value() -> None:
    assert len({colour.rgb for colour in EVERY}) == 2 * HALF


def test_no_colour_is_near_that_of_an_alarm() -> None:
    """Neither OKLCH nor HSV gives any colour a hue from red over orange to yellow."""
    for colour in EVERY:
        assert 130 <= colour.oklch[2] <= 330
        hue, saturation, _ = colorsys.rgb_to_hsv(*(part / 255 for part in channels(colour)))
        assert 80 <= 360 * hue <= 320 or saturation < 0.25, (colour, colour.rgb)


def test_text_has_enough_contrast_on_every_colour() -> None:
    for colour in EVERY:
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in (value / 255 for value in channels(colour))
        ]
        luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        white, black = 1.05 / (luminance + 0.05), (luminance + 0.05) / 0.05
        assert (white if ink_on(colour) == "#ffffff" else black) >= 4.5, (colour, white, black)


def test_leases_of_a_small_cluster_differ_clearly() -> None:
    seats = assign(Holder(f"{s}/{gpu}", s, (gpu,), 1000, 8 * s + gpu) for s in range(4) for gpu in range(8))
    assert min(distance(one, other) for one, other in combinations(seats.values(), 2)) >= 0.045
    starts = [seats[f"{s}/0"] for s in range(4)]
    assert min(distance(one, other) for one, other in combinations(starts, 2)) >= 0.1


def test_leases_of_one_server_differ_clearly() -> None:
    """Differences in lightness or blue serve people with red-green colour blindness too."""
    for server in range(128):
        row = assign(Holder(f"{server}/{gpu}", server, (gpu,), 1000, gpu) for gpu in range(8))
        for one, other in combinations(row.values(), 2):
            assert distance(one, other) >= 0.035, (server, one, other)
        for gpu in range(7):  # neighbours
            assert distance(row[f"{server}/{gpu}"], row[f"{server}/{gpu + 1}"]) >= 0.1


def distance(one: Colour, other: Colour) -> float:
    return math.dist(cartesian(one), cartesian(other))


def cartesian(colour: Colour) -> tuple[float, float, float]:
    lightness, chroma, hue = colour.oklch
    return lightness, chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))


def test_the_console_draws_the_same_colours() -> None:
    rules = dict(re.findall(r"\.([hv]\d+) \{ ([^}]*) \}", CSS.read_text()))
    for colour in EVERY:
        lightness, _, hue = colour.oklch
        assert rules[f"h{colour.hue}"] == f"--h: {hue:.2f};"
        assert rules[f"v{colour.level}"] == f"--l: {lightness:.3f}; --ink: {ink_on(colour)};"
    assert f"--c: {colours.CHROMA};" in CSS.read_text()
    assert f"--c: {colours.PALE_CHROMA};" in CSS.read_text()
