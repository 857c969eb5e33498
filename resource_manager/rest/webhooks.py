"""Webhooks of the cluster's notices: each event is sent at least once, from the history, by one service."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from html import escape
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import TypeAdapter

from resource_manager.core import changes, lease_limits
from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import Notice
from resource_manager.core.maintenance import preemptor_in_words, to_the_minute
from resource_manager.core.name_lookup import name_in
from resource_manager.core.names import name_of
from resource_manager.errors import LockTimeoutError, ResourceManagerError
from resource_manager.manager.cluster_file.notice_tables import in_words
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.wording import risk_in_words
from resource_manager.rest.state_follower import StateFollower
from resource_manager.storage import Store
from resource_manager.storage.clock import JUMP_S

logger = logging.getLogger(__name__)
THREAD = "gpu-notices"
logging.getLogger("httpx").addFilter(lambda record: record.threadName != THREAD)  # it logs whole addresses

SEND_EVERY_S = 2.0
TIMEOUT_S = 5.0
CLAIM_S = 60.0
"""Time for which a service has an address for itself; after its death another one goes on."""

PAGE = 1000
TURN_S = CLAIM_S / 3
"""Time after which a service that is behind moves the cursor, long before its claim ends."""

NOTE_EVERY_S = 24 * 3600.0
"""Time after which a cursor is written again: a store forgets the records that nobody writes for a week."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 600.0
MAX_REDIRECTS = 3
GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
SIGNATURE = "GPU-Manager-Signature"
TYPE = "gpu-manager."
QUARANTINED = "is quarantined: its job may still run, and its GPUs stay allocated"

Post = Callable[[Notice, bytes, Mapping[str, str]], None]


class UndeliveredError(ResourceManagerError):
    """An event that its address did not take; the message does not name the address."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Version up to which an address has its events, and until when which service sends to it.

    It did not take the last `failed` attempts, and is not tried before `next_at`.
    """

    incarnation: str
    version: int
    by: str = ""
    until: float = 0.0
    failed: int = 0
    next_at: float = 0.0


CURSORS = TypeAdapter(Cursor)
"""It passes over a field that a newer service beside this one has added."""


@dataclass(frozen=True, slots=True)
class Event:
    """What happened, to whom, in a sentence; `team` is that of the lease, if it is about one."""

    kind: str
    subject: str
    text: str
    team: str | None = None


class NoticeSender:
    """Sender of the events of a store to the addresses that its cluster names; `key` signs them.

    Cursors are kept beside the state. A service claims an address under the lock, sends without it, and then
    moves the cursor: who dies between sends again what was sent, and loses nothing.
    """

    def __init__(
        self, manager: GPUResourceManager, watch: StateFollower, key: str = "", post: Post | None = None
    ) -> None:
        self._store: Store = manager.store
        self._watch = watch
        self._key = key.encode()
        self._post = post or deliver
        self._me = secrets.token_hex(8)
        self._threads: dict[Notice, threading.Thread] = {}

    def send(self, wait_s: float = SEND_EVERY_S) -> None:
        """Send what is due, and wait so long for each address: one that hangs keeps its own thread only."""
        for notice in self._watch.read(lambda cluster, now: cluster.settings.notices):
            busy = self._threads.get(notice)
            if busy is None or not busy.is_alive():
                thread = threading.Thread(target=self._try, args=(notice,), name=THREAD, daemon=True)
                self._threads[notice] = thread
                thread.start()
        for thread in self._threads.values():
            thread.join(wait_s)

    def _try(self, notice: Notice) -> None:
        try:
            self.serve(notice)
        except Exception as error:  # such as a silent store: the next turn finds out
            is_known = isinstance(error, ResourceManagerError)
            logger.warning("%s: %s", in_words(notice), error, exc_info=not is_known)

    def serve(self, notice: Notice) -> None:
        """Send to one address what is due, unless another service does."""
        version = self._watch.read(lambda cluster, now: cluster.version)
        cursor = self._claim(notice, version)
        if cursor is None:
            return
        at, failed, ends_at = cursor.version, 0, time.monotonic() + TURN_S
        try:
            for at_version, change, event in chain.from_iterable(map(self._with_events, self._pages(at))):
                if event is not None and event.kind in notice.on and notice.team in ("", event.team):
                    self._post(notice, *self._message(at_version, change, event))
                at = at_version
                if time.monotonic() > ends_at:
                    break
            else:
                at = max(at, version)  # what is missing was dropped by the store, or by a reset
        except UndeliveredError as error:
            failed = cursor.failed + 1
            logger.warning("%s: not taken, attempt %d: %s", in_words(notice), failed, error)
        next_at = self._store.now() + _pause_s(failed)
        self._move(notice, replace(cursor, version=at, by="", until=0.0, failed=failed, next_at=next_at))

    def _claim(self, notice: Notice, version: int) -> Cursor | None:
        """Return the cursor of an address with something to send that no other service sends to now."""
        name, now = _name(notice), self._store.now()
        known = _cursor(self._store, name)
        if known is not None and not self._is_due(known, version, now):
            return None
        first = known or Cursor(self._store.incarnation, self._begin(notice, version))
        with self._locked():
            known = _cursor(self._store, name) or first
            if known.incarnation != self._store.incarnation:
                known = Cursor(self._store.incarnation, min(known.version, version))
            if not self._is_due(known, version, now):
                return None
            mine = replace(known, by=self._me, until=now + CLAIM_S)
            _keep(self._store, name, mine)
            return mine

    def _is_due(self, cursor: Cursor, version: int, now: float) -> bool:
        is_mine = cursor.by in ("", self._me) or not _is_ahead(cursor.until, now, CLAIM_S)
        is_other = cursor.incarnation != self._store.incarnation
        is_old = cursor.next_at <= now - NOTE_EVERY_S  # a new one, too: noted before its first event
        is_time = not _is_ahead(cursor.next_at, now, _pause_s(cursor.failed))
        return is_mine and is_time and (cursor.version < version or is_other or is_old)

    def _move(self, notice: Notice, cursor: Cursor) -> None:
        with self._locked():
            if (known := _cursor(self._store, _name(notice))) is not None and known.by == self._me:
                _keep(self._store, _name(notice), cursor)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self._store.lock()
        if not lock.acquire(TIMEOUT_S):
            raise LockTimeoutError(TIMEOUT_S)
        try:
            yield
        finally:
            lock.release()

    def _begin(self, notice: Notice, version: int) -> int:
        """Return the version from which a new address has its events: that of the change which named it."""
        begin = version
        for at, change in chain.from_iterable(self._pages(0)):
            if isinstance(change, changes.ClusterSettingsChanged):
                is_named = notice in change.settings.notices
                begin = min(begin, at) if is_named else version
        return begin

    def _pages(self, version: int) -> Iterator[list[tuple[int, changes.Change]]]:
        """Yield the kept changes after a version, the oldest first."""
        while page := self._store.history(version, PAGE):
            yield page
            version = page[-1][0]

    def _with_events(
        self, page: list[tuple[int, changes.Change]]
    ) -> list[tuple[int, changes.Change, Event | None]]:
        """Return the changes, each with the event that it is, by one look at the state."""
        return self._watch.read(
            lambda cluster, now: [(at, change, event_of(cluster, self._watch, change)) for at, change in page]
        )

    def _message(self, version: int, change: changes.Change, event: Event) -> tuple[bytes, dict[str, str]]:
        """Return the event as JSON of CloudEvents 1.0, whose `text` Slack shows, and its headers."""
        body = json.dumps(
            {
                "specversion": "1.0",
                "id": f"{self._store.incarnation}-{version}",
                "source": "/gpu-manager",
                "type": TYPE + event.kind.replace(" ", "-"),
                "subject": event.subject,
                "time": datetime.fromtimestamp(change.at, UTC).isoformat(),
                "datacontenttype": "application/json",
                "text": _as_written(event.text),
                "data": {"on": event.kind, "team": event.team or "", "text": event.text},
            }
        ).encode()
        headers = {"Content-Type": "application/cloudevents+json; charset=utf-8"}
        if self._key:
            headers[SIGNATURE] = f"sha256={hmac.new(self._key, body, hashlib.sha256).hexdigest()}"
        return body, headers


def _pause_s(failed: int) -> float:
    """Return the time before the next attempt to send after so many that failed, 0 after none."""
    return min(FIRST_PAUSE_S * 2 ** min(failed - 1, 10), LONGEST_PAUSE_S) if failed else 0.0


def _is_ahead(at: float, now: float, longest_s: float) -> bool:
    """Return whether that is to come; what is further ahead than it can be is of before a clock's jump."""
    return now < at <= now + longest_s + JUMP_S


def _as_written(text: str) -> str:
    """Return a text as Slack and Mattermost show it as it is: it calls no channel together, hides no link."""
    return re.sub(r"(?<!\w)@", "@\u200b", escape(text, quote=False).replace("](", "] ("))


def event_of(cluster: ClusterState, watch: StateFollower, change: changes.Change) -> Event | None:
    """Return the event that a change is, None if it is none; `watch` knows the lives of leases."""
    ended: tuple[int, ...] = ()
    life = watch.lives.lives.get(getattr(change, "fencing_token", 0))
    match change:
        case changes.GpuClosed():
            subject = f"GPU {change.gpu_id} of {change.node}"
            return Event("gpu closed", subject, f"{subject} takes no new leases: {change.reason}")
        case changes.AgentLost():
            since = to_the_minute(change.since)
            text = f"{change.node} has been silent since {since}: it takes no new leases"
            return Event("server silent", change.node, text)
        case changes.DeadlineRisk():
            entry = cluster.leases.get(change.lease_id) or cluster.pending.get(change.lease_id)
            if entry is None:  # it is over
                return None
            name = name_of(entry)
            text = f"{name} {risk_in_words(change.ends_by)}"
            return Event("deadline at risk", name, text, entry.request.team)
        case changes.Preempting(preemptor=by) if by:
            kind = "idle" if by == lease_limits.IDLE else "preempted"
            why = f"is {lease_limits.in_words(by, name_in(cluster, preemptor_in_words(by)))}"
        case changes.Quarantined() if life is None or not life.was_quarantined(change.at):
            kind, why = "quarantined", QUARANTINED
        case changes.MembersReleased() if life is not None and not life.was_quarantined(change.at):
            kind, why, ended = "quarantined", QUARANTINED, change.ranks
        case _:
            return None
    if life is None:
        return Event(kind, change.lease_id, f"{change.lease_id} {why}", "")
    nodes = ", ".join(dict.fromkeys(member.node for rank, member in life.granted.ranked if rank not in ended))
    name = name_of(life.lease)
    return Event(kind, name, f"{name} on {nodes} {why}", life.lease.request.team)


def deliver(notice: Notice, body: bytes, headers: Mapping[str, str]) -> None:
    """Post an event; raises `UndeliveredError`. A redirect into a private network needs `private`."""
    there = ""
    try:
        url = httpx.URL(notice.to)
        with httpx.Client(timeout=TIMEOUT_S) as client:
            for _ in range(MAX_REDIRECTS + 1):
                with client.stream(
                    "POST",
                    url.copy_with(host=there or url.host),
                    content=body,
                    headers={**headers, "Host": url.netloc.decode()},
                    extensions={"sni_hostname": url.host} if there else {},
                ) as answer:
                    if not answer.has_redirect_location:
                        if not answer.is_success:
                            raise UndeliveredError(f"it answered {answer.status_code}")
                        return
                    url = url.join(answer.headers["Location"])
                there = "" if notice.private else _public(url)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
        raise UndeliveredError(str(error) or type(error).__name__) from error
    raise UndeliveredError(f"it redirects more than {MAX_REDIRECTS} times")


def _public(url: httpx.URL) -> str:
    """Return the address to which a redirect leads: the name may mean another one when it is asked again.

    Raises `UndeliveredError` if any of its addresses is not public.
    """
    addresses = []
    if url.scheme in ("http", "https"):
        found = socket.getaddrinfo(url.host, url.port or url.scheme, type=socket.SOCK_STREAM)
        addresses = [str(address[0]) for *_, address in found]
    if not addresses or not all(map(is_public, addresses)):
        raise UndeliveredError(
            "it redirects to a private address, which needs private = true in its [[notices]]"
        )
    return addresses[0]


def is_public(address: str) -> bool:
    """Return whether an IP address is one host of the public network, also where IPv6 wraps one of IPv4."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found
    is_old = isinstance(found, ipaddress.IPv6Address) and (found.sixtofour or found not in GLOBAL_UNICAST)
    return found.is_global and not found.is_multicast and not is_old


def failed_attempts(store: Store, notices: Iterable[Notice]) -> dict[tuple[str, str], int]:
    """Return how often in a row each address did not take an event, by host and team; 0 if it did."""
    named = {_name(notice): notice for notice in notices}
    cursors = _cursors(store, named)
    found: dict[tuple[str, str], int] = {}
    for name, notice in named.items():
        key = urlsplit(notice.to).hostname or "", notice.team
        failed = cursors[name].failed if name in cursors else 0
        found[key] = max(found.get(key, 0), failed)
    return found


def _name(notice: Notice) -> str:
    """Return the name, which no server can have, of the record of an address."""
    stated = json.dumps(asdict(notice), sort_keys=True)
    return f"notices/{hashlib.sha256(stated.encode()).hexdigest()[:16]}"


def _cursor(store: Store, name: str) -> Cursor | None:
    return _cursors(store, [name]).get(name)


def _cursors(store: Store, names: Iterable[str]) -> dict[str, Cursor]:
    found = store.reports.records(list(names))
    return {name: CURSORS.validate_json(text) for name, text in found.items()}


def _keep(store: Store, name: str, cursor: Cursor) -> None:
    text: Any = json.dumps(asdict(cursor)).encode()
    store.reports.put(name, text, text, CLAIM_S)
