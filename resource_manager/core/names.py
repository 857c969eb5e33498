"""Names of leases and pending requests for people: display name `my_dag.train[3]` and short id `k7wd`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from resource_manager.core.identifiers import BY_HAND
from resource_manager.core.models import Lease
from resource_manager.core.pending import PendingRequest

MAX_SHOWN = 120
"""Maximum length of a name in a sentence; names may have a thousand characters."""

MAX_LISTED = 4
"""Number of leases that a sentence lists."""

ALPHABET = "bcdfghjkmnprtvwx2345679"
"""Characters of short ids: no vowels, which make words, and none that is easily taken for another one."""

PAIRS: tuple[str, ...] = tuple(first + second for first in ALPHABET for second in ALPHABET)

SHORT, LONG = 4, 5
SCRAMBLES: dict[int, int] = {SHORT: 163_170, LONG: 3_033_936}
"""Factors that scramble the numbers of each length.

They are chosen so that any two of 12 in a row differ in every character, and any two of 2900 in two at least.
"""

SHORT_IDS: int = len(ALPHABET) ** SHORT
CYCLE: int = SHORT_IDS + len(ALPHABET) ** LONG
"""Number of short ids, 279,841 of four and 6,436,343 of five characters; then they are given again.

None is given again within 30 days while fewer than 223,000 requests a day arrive.
"""

_ID = re.compile(r"[\w.-]{1,250}")
_MAP_INDEX = re.compile(r"-1|[0-9]{1,9}")

Named = Lease | PendingRequest


def short_id(sequence: int) -> str:
    """Return the short id of the request with that number in the order of arrival.

    The first have four characters, later ones five. It is a function of the number, so it survives requeueing
    and all replicas agree.
    """
    number = sequence % CYCLE
    length = SHORT if number < SHORT_IDS else LONG
    if length == SHORT:
        first, second = divmod(number * SCRAMBLES[SHORT] % SHORT_IDS, len(PAIRS))
        return PAIRS[first] + PAIRS[second]
    rest, second = divmod((number - SHORT_IDS) * SCRAMBLES[LONG] % (CYCLE - SHORT_IDS), len(PAIRS))
    head, first = divmod(rest, len(PAIRS))
    return ALPHABET[head] + PAIRS[first] + PAIRS[second]


def number_of(text: str) -> int | None:
    """Return the number modulo `CYCLE` whose short id the text is, None if it is not a short id."""
    length = len(text)
    if length not in SCRAMBLES or not set(text) <= set(ALPHABET):
        return None
    scrambled = 0
    for character in text:
        scrambled = scrambled * len(ALPHABET) + ALPHABET.index(character)
    count = len(ALPHABET) ** length
    number: int = scrambled * pow(SCRAMBLES[length], -1, count) % count
    return number if length == SHORT else number + SHORT_IDS


def task_of(labels: Mapping[str, str]) -> tuple[str, str, str, int] | None:
    """Return the DAG, run, task and map index in labels, or None if no task of Airflow has such ids.

    Labels are what a lease's owner says, and the ids become parts of the paths of Airflow's pages and API:
    none may be a step to another page, as `..` is however it is quoted.
    """
    get = labels.get
    return _task(get("dag_id", ""), get("run_id", ""), get("task_id", ""), get("map_index") or "-1")


@lru_cache
def _task(dag_id: str, run_id: str, task_id: str, map_index: str) -> tuple[str, str, str, int] | None:
    if not (_ID.fullmatch(dag_id) and _ID.fullmatch(task_id) and _MAP_INDEX.fullmatch(map_index)):
        return None
    if any(each in ("", ".", "..") for each in (dag_id, run_id, task_id)):
        return None
    return dag_id, run_id, task_id, int(map_index)


def display_name(lease_id: str, labels: Mapping[str, str]) -> str:
    """Return `dag.task`, for a mapped task `dag.task[3]`; `ada@desk` of what she runs by hand there.

    Everything else is called by its lease id.

    The lease of a `gpu_lease` has the name of its group, whose first task asks for it.
    """
    if not labels or (task := task_of(labels)) is None:
        by_hand = BY_HAND.fullmatch(lease_id)
        return by_hand[1] or lease_id if by_hand else lease_id
    dag_id, _, task_id, map_index = task
    if labels.get("scope") == "run":
        task_id = task_id.removesuffix(".allocate")
    return f"{dag_id}.{task_id}" + (f"[{map_index}]" if map_index >= 0 else "")


def name_of(entry: Named) -> str:
    """Return display name and short id, as sentences name a lease or pending request."""
    return full_name(entry.lease_id, entry.request.labels, entry.sequence)


def full_name(lease_id: str, labels: Mapping[str, str], sequence: int) -> str:
    """Return what `name_of` does, of the parts of a lease."""
    return f"{short(display_name(lease_id, labels))} {short_id(sequence)}"


def is_hold(lease_id: str, labels: Mapping[str, str]) -> bool:
    """Return whether it is of `hold`: GPUs for a time, without a job."""
    by_hand = BY_HAND.fullmatch(lease_id)
    return "launcher" not in labels and by_hand is not None and by_hand[1] is not None


def short(name: str, most: int = MAX_SHOWN) -> str:
    """Return the name, with the middle of a very long one left out: both ends distinguish names."""
    if len(name) <= most:
        return name
    half = most // 2 - 1
    return f"{name[:half]}…{name[-half:]}"


def listed(names: Sequence[str], most: int = MAX_LISTED) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
