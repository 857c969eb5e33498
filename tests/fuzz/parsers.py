"""Every parser of data from outside, by name."""

from __future__ import annotations

from functools import cache

from tests.fuzz import manager, servers, simulators
from tests.fuzz.parser import Parser


@cache
def parsers() -> dict[str, Parser]:
    return {**manager.parsers(), **servers.parsers(), **simulators.parsers()}
