"""Jobs of requests and results of leases as they are stored: encrypted if there is a key."""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from resource_manager.core.identifiers import job_key
from resource_manager.core.models import Lease
from resource_manager.errors import CorruptStateError, InvalidRequestError, SettingsError, how_to_install
from resource_manager.storage.jobs import (
    A_KEY,
    LIVE_S,
    MAX_BYTES_OF_CALLER,
    MAX_JOB_BYTES,
    RESULT_S,
    JobRow,
    JobStore,
    TooManyJobsError,
    job_name,
    newest_name,
    order_name,
    result_name,
)
from resource_manager.storage.once import digest

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet

MAX_LAST_LINE = 2000

COUNT_S = 10.0
"""Time for which a caller's bytes are known without counting: a store looks at each of their jobs for it."""

MAX_COUNTED = 1000
"""Most callers whose bytes are known without counting."""

JOB_FIELDS = {"command", "env", "launcher"}

BELL = digest("bell")

OUTPUT_S = 60.0
"""Time for which a part of a job's output waits for whoever asked for it."""

KNOWN_S = 60.0
"""Time for which an agent counts as one that knows of a lease; it says so again with every question."""

PREPARED_S = 3600.0
"""Time for which an order to prepare a job stays: its end is that of no lease, where the job has no place."""

MAX_QUESTIONS = 256
"""Most questions about output that wait for the agent of a server; the oldest make room."""


class JobExit(TypedDict):
    """End of a lease's job: exit code (None: it left none), last line of its output, and its time."""

    exit_code: int | None
    last_line: str
    ended_at: float | None


class AgentJob(TypedDict):
    """Job of a member of a lease that the agent of a server ran, which keeps its output for some days."""

    server: str
    key: str


class JobResult(JobExit):
    """Stored end of a job, with whose lease it was; `jobs` are in the order of the ranks."""

    owner: str
    team: str
    fencing_token: int
    outcome: str
    reason: str
    jobs: list[AgentJob]


class Question(TypedDict):
    """Question for a part of the output of a job: its number, and the byte from which it is asked for."""

    key: str
    offset: int
    n: str


class StoredJobs:
    """Jobs and results in the store; `keys` are Fernet keys, the first of which encrypts, none if empty.

    Where there are keys a text that none of them has signed is refused: who may write the store alone cannot
    have a job run.
    """

    def __init__(self, store: JobStore, keys: str) -> None:
        self._store = store
        self._fernet = _fernet(keys)
        self._counted: dict[str, tuple[float, int]] = {}
        """Of callers the time until which their bytes are known, and those bytes, the newest last."""
        self.begin()
        _open.add(self)

    def begin(self) -> None:
        """Begin with locks of its own, as in a forked child: no thread there gives back its parent's."""
        self._asking, self._counting = threading.Lock(), threading.Lock()

    def row_of_job(self, lease_id: str, owner: str, job: Mapping[str, Any]) -> JobRow:
        """Return what a commit stores; raises `InvalidRequestError` and `TooManyJobsError`."""
        try:
            plain = json.dumps(job, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise InvalidRequestError("{job} cannot be stored: {}", error) from None
        size = len(plain.encode())
        if size > MAX_JOB_BYTES:
            text = (
                "{job} has {:,} bytes, at most {:,} are stored with a request: put what is long into a file "
                "on the servers"
            )
            raise InvalidRequestError(text, size, MAX_JOB_BYTES)
        check_job(job)
        self._check_room(owner, size)
        return JobRow(job_name(lease_id), owner, self._sealed(["job", lease_id, owner, job]), LIVE_S)

    def _check_room(self, owner: str, size: int) -> None:
        """Count a job of that caller; raises `TooManyJobsError`, always because of what is stored now."""
        with self._counting:
            until, known = self._counted.pop(owner, (0.0, 0))
            now = time.monotonic()
            if now >= until or known + size > MAX_BYTES_OF_CALLER:
                until, known = now + COUNT_S, self._store.bytes_of(owner)
            has_room = known + size <= MAX_BYTES_OF_CALLER
            self._counted[owner] = until, known + size * has_room
            while len(self._counted) > MAX_COUNTED:
                del self._counted[next(iter(self._counted))]
        if not has_room:
            raise TooManyJobsError(
                f"the jobs of {owner or 'this caller'} have {MAX_BYTES_OF_CALLER // 2**20} MiB already, each "
                "until a day after its end: wait, or cancel pending requests"
            )

    def rows_of_result(self, lease: Lease, ended: JobExit, outcome: str, reason: str) -> list[JobRow]:
        """Return what the commit that releases the lease stores, with the end of a long last line."""
        lease_id, token = lease.lease_id, lease.fencing_token
        result: JobResult = {
            **ended,
            "last_line": ended["last_line"][-MAX_LAST_LINE:],
            "owner": lease.request.owner,
            "team": lease.request.team,
            "fencing_token": token,
            "outcome": outcome,
            "reason": reason,
            "jobs": [
                {"server": member.node, "key": job_key(lease_id, token, rank, lease.request.nodes)}
                for (rank, member), place in zip(lease.ranked, lease.places, strict=False)
                if place.launcher == "agent"
            ],
        }
        text = self._sealed([f"result {token}", lease_id, result])
        rows = [JobRow(result_name(lease_id, token), None, text, RESULT_S)]
        for of in ((lease_id,), (lease_id, lease.request.owner)):
            newest = self._sealed(["newest result", *of, {"fencing_token": token}])
            rows.append(JobRow(newest_name(*of), None, newest, RESULT_S))
        return rows

    def job(self, lease_id: str, owner: str = "") -> dict[str, Any] | None:
        """Return the job of an owner's request; raises `CorruptStateError` for another's, or none of ours."""
        return self._stored_value(job_name(lease_id), "job", lease_id, owner)

    def has(self, lease_id: str, owner: str, job: Mapping[str, Any]) -> bool:
        """Return whether this is the stored job of an owner's request."""
        return bool(self.job(lease_id, owner) == json.loads(json.dumps(job)))

    def jobs(self, owners: Mapping[str, str]) -> dict[str, dict[str, Any] | CorruptStateError]:
        """Return the jobs of the requests with these ids and owners, by id; of what is none of ours, why."""
        return self._stored_values({job_name(each): (each, owner) for each, owner in owners.items()}, "job")

    def result(
        self, lease_id: str, fencing_token: int | None = None, owner: str | None = None
    ) -> JobResult | None:
        """Return the result of a lease, by default of the newest of that id, for 7 days.

        With an `owner` of their newest, or else of all. Raises `CorruptStateError` if it is none of ours.
        """
        if fencing_token is None:
            newest = None if owner is None else self._newest(lease_id, owner)
            newest = newest or self._newest(lease_id)
            if newest is None:
                return None
            fencing_token = int(newest["fencing_token"])
        name = result_name(lease_id, fencing_token)
        found: Any = self._stored_value(name, f"result {fencing_token}", lease_id)
        return found  # type: ignore[no-any-return]

    def _newest(self, *of: str) -> dict[str, Any] | None:
        return self._stored_value(newest_name(*of), "newest result", *of)

    def orders(self, keys: Iterable[str]) -> dict[str, dict[str, Any] | CorruptStateError]:
        """Return the orders about these jobs, by key; of one that is none of ours, why."""
        return self._stored_values({order_name(key): (key,) for key in keys}, "order")

    def give_order(
        self, key: str, order: Mapping[str, Any], owner: str = "", *, needs_room: bool = True
    ) -> None:
        """Store what an agent is to do with a job of that owner, in place of an earlier order.

        Raises `TooManyJobsError` where it `needs_room` for more than the earlier one and the owner has none.
        """
        text = self._sealed(["order", key, order])
        if len(text) > 2 * MAX_JOB_BYTES:
            raise InvalidRequestError(
                "{job} has {:,} bytes, at most {:,} are stored", len(text), 2 * MAX_JOB_BYTES
            )
        if needs_room:
            before = self._store.texts([order_name(key)]).get(order_name(key), "")
            if len(text) > len(before):
                self._check_room(owner, len(text) - len(before))
        keep_s = PREPARED_S if order["want"] == "prepare" else RESULT_S
        self._store.write([JobRow(order_name(key), owner, text, keep_s)])

    def ring(self, *servers: str) -> None:
        """Have services look at what the agents of these servers are to do."""
        text = secrets.token_hex(6)
        names = (*(digest(f"ring {server}") for server in servers), BELL)
        self._store.write([JobRow(name, None, text, RESULT_S) for name in names])

    @property
    def bell(self) -> str:
        """A text that is another one after each `ring`."""
        return self._store.texts([BELL]).get(BELL, "")

    def rings(self, servers: Iterable[str]) -> dict[str, str]:
        """Return for each of the servers that was rung for a text that is another one after each time."""
        names = {digest(f"ring {server}"): server for server in servers}
        return {names[name]: text for name, text in self._store.texts(names).items()}

    def note_known(self, fencing_token: int, server: str, servers: Iterable[str]) -> bool:
        """Note that the agent of a server knows of a lease; return whether those of all its servers do."""
        names = {each: digest(f"known {fencing_token} {each}") for each in servers}
        if len(names) > 1:
            self._store.write([JobRow(names[server], None, "known", KNOWN_S)])
        return len(names) == 1 or len(self._store.texts(names.values())) == len(names)

    def questions(self, server: str) -> list[Question]:
        """Return the questions about output that the agent of a server is to answer."""
        found: Any = self._stored_value(digest(f"questions {server}"), "questions", server)
        return [] if found is None else found["asked"]

    def ask(self, server: str, question: Question) -> None:
        """Add a question for the agent of a server, unless it waits there already.

        It may get lost if another process asks at the same time: ask again until there is an answer.
        """
        with self._asking:
            waiting = self.questions(server)
            if question not in waiting:
                self._keep_questions(server, [*waiting, question][-MAX_QUESTIONS:])

    def output(self, question: Question) -> dict[str, Any] | None:
        """Return the part of a job's output that answers a question, once there is one."""
        return self._stored_value(digest(f"output {question['n']}"), "output", question["key"])

    def keep_output(self, server: str, question: Question, part: Mapping[str, Any]) -> None:
        """Store the answer of a server's agent to a question, which waits no longer."""
        text = self._sealed(["output", question["key"], part])
        self._store.write([JobRow(digest(f"output {question['n']}"), None, text, OUTPUT_S)])
        with self._asking:
            self._keep_questions(server, [each for each in self.questions(server) if each != question])

    def _keep_questions(self, server: str, questions: Sequence[Question]) -> None:
        text = self._sealed(["questions", server, {"asked": questions}])
        self._store.write([JobRow(digest(f"questions {server}"), None, text, OUTPUT_S)])

    def _stored_value(self, name: str, about: str, *of: str) -> dict[str, Any] | None:
        text = self._store.texts([name]).get(name)
        return None if text is None else self._opened(text, about, *of)

    def _stored_values(
        self, of: Mapping[str, tuple[str, ...]], about: str
    ) -> dict[str, dict[str, Any] | CorruptStateError]:
        """Return what is stored under these names, by the id that it is of; of what is none of ours, why."""
        values: dict[str, dict[str, Any] | CorruptStateError] = {}
        for name, text in self._store.texts(of).items():
            try:
                values[of[name][0]] = self._opened(text, about, *of[name])
            except CorruptStateError as error:
                values[of[name][0]] = error
        return values

    def _sealed(self, value: Sequence[Any]) -> str:
        plain = json.dumps(value, separators=(",", ":"))
        return plain if self._fernet is None else self._fernet.encrypt(plain.encode()).decode()

    def _opened(self, text: str, about: str, *of: str) -> dict[str, Any]:
        """Return what was sealed as that of a lease, a job or a server; raises `CorruptStateError`.

        `of` is its id, and for the job of a request its owner too.
        """
        whose = " of owner ".join(map(repr, of))
        try:
            if self._fernet is not None:
                text = self._fernet.decrypt(text.encode()).decode()
            said = json.loads(text)
        except Exception as error:  # `InvalidToken` of a package that is not always there
            raise CorruptStateError(
                f"what is stored as the {about} of {whose} cannot be decrypted: GPU_MANAGER_JOB_KEYS must be "
                "the same in all processes"
            ) from error
        if not isinstance(said, list) or said[:-1] != [about, *of] or not isinstance(said[-1], dict):
            another = " or another owner's: submit it again" if len(of) > 1 else ""
            raise CorruptStateError(f"what is stored as the {about} of {whose} is something else{another}")
        return said[-1]


_open: weakref.WeakSet[StoredJobs] = weakref.WeakSet()


def _in_forked_child() -> None:
    for stored in list(_open):
        stored.begin()


os.register_at_fork(after_in_child=_in_forked_child)


def check_job(job: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` for what no agent can run: it has a `command`, and may have an `env`."""
    if job.get("image") or job.get("container"):
        raise InvalidRequestError("{job} has an image, and agents run none: use launcher='docker' in a task")
    if job.get("launcher") not in (None, "", "agent") or job.keys() - JOB_FIELDS:
        raise InvalidRequestError("{job} may have {} only", ", ".join(sorted(JOB_FIELDS)))
    command, env = job.get("command"), job.get("env", {})
    if not isinstance(command, list | tuple) or not command or not all(map(_is_word, command)):
        raise InvalidRequestError("{job}: command must be a list of texts, the first a program")
    if not isinstance(env, Mapping) or not all(
        _is_word(name) and name and not {"=", "\n"} & {*name} and _is_word(value)
        for name, value in env.items()
    ):
        raise InvalidRequestError("{job}: env must have texts by the names of variables")


def _is_word(value: object) -> bool:
    """Return whether a program can get this as an argument."""
    return isinstance(value, str) and re.search("[\0\ud800-\udfff]", value) is None


def _fernet(keys: str) -> MultiFernet | None:
    names = keys.replace(",", " ").split()
    if not names:
        return None
    try:
        from cryptography.fernet import Fernet, MultiFernet
    except ModuleNotFoundError as error:
        raise SettingsError(f"GPU_MANAGER_JOB_KEYS needs cryptography: {how_to_install('jobs')}") from error
    try:
        return MultiFernet([Fernet(key) for key in names])
    except ValueError as error:
        raise SettingsError(
            "GPU_MANAGER_JOB_KEYS has Fernet keys with spaces or commas between, each of 32 bytes as "
            f"URL-safe base64, as this makes one: {A_KEY}"
        ) from error
