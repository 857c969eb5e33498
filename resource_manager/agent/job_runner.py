"""Jobs that the agent of a server runs: it makes what the service says should be, and tells what is.

The answer of a service is a list of all jobs that should be here, each with what is wanted of it, so that a
lost answer costs a round and nothing else. A job has a directory, by which it is found again after a restart
of the agent, is started at most once, and never after it was ended.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from resource_manager.agent import long_logs, old_outputs
from resource_manager.agent.runs_to_tell import runs_to_tell
from resource_manager.core.identifiers import as_reason, token_of_key
from resource_manager.jobs.directories import ending, job_files, job_processes, job_states, starting
from resource_manager.jobs.launchers import walls
from resource_manager.jobs.launchers.base import LauncherError, check_no_other_lease, is_key, walls_of

TICK_S = 0.1
PRUNE_EVERY_S = 600.0
CUT_EVERY_S = 2.0
LAST_LINE_BYTES = 2000
AGAIN_S = 10.0
"""Time after which what the service orders once is tried again, if it failed for a reason that may pass."""

AT_ONCE = 16
"""Jobs that are started at once."""

MAX_JOBS = 1000
"""Jobs that are ended at once: each of them may take its grace, which its owner chooses."""

NOT_DONE = {"want": None, "n": None, "error": None, "refusal": None, "began": None, "walls": ""}
"""What is told of a job of which nothing was ordered yet."""


STILL_RUNS = {"state": "running", "exit_code": None, "ended_at": None}


class OtherAgentError(Exception):
    """Another agent runs the jobs of this folder."""


class AgentJobs:
    """Jobs under `root` of the user of this process; `changed` is called when their states are other ones.

    `newest` is the incarnation and version of the newest state that an agent before knew. Thread-safe. Raises
    `OtherAgentError` if another agent runs here.
    """

    def __init__(
        self,
        server: str,
        root: str,
        *,
        changed: Callable[[], None],
        say: Callable[[str], None],
        newest: tuple[str, int] = ("", 0),
    ) -> None:
        self._server = server
        self._root = os.path.abspath(os.path.expanduser(root))
        self._changed, self._say = changed, say
        self._lock = threading.Lock()
        self._items: dict[str, Mapping[str, Any]] = {}
        self._acts: dict[str, Future[Any]] = {}
        self._done: dict[str, dict[str, Any]] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._newest = newest
        self._pruned_at = self._cut_at = time.monotonic()
        self._uncuttable: set[str] = set()
        self._marked = job_states.marked_in(self._root)
        self._stop = threading.Event()
        place = starting.prepare(self._root, "probe")
        ending.remove(self._root, "probe")
        self.user = str(place["user"])
        self._place = {name: str(place[name]) for name in ("machine", "folder", "mark", "user")}
        self._held = os.open(os.path.join(self._root, "agent"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._held)
            raise OtherAgentError(f"another agent runs the jobs in {self._root}: stop it first") from None
        self._starting = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="gpu-job")
        self._ending = ThreadPoolExecutor(MAX_JOBS, thread_name_prefix="gpu-job-end")
        self._thread = threading.Thread(target=self._run, name="gpu-jobs", daemon=True)
        self._has_changed()
        self._thread.start()

    # ---- the service's side ----

    def take(self, answer: Mapping[str, Any]) -> None:
        """Make what the service says be, unless it is for another server, or older than what is known."""
        if answer.get("server") != self._server:
            self._say(
                f"an answer for {str(answer.get('server'))[:60]!r} is not followed here, on {self._server}"
            )
            return
        newest = (str(answer.get("incarnation", "")), int(answer.get("version", 0)))
        with self._lock:
            if newest < self._newest:
                return  # an old answer that comes again
            self._newest = newest
            self._items = {item["key"]: item for item in answer["jobs"] if self.is_here(item)}

    def is_here(self, wanted: Mapping[str, Any]) -> bool:
        """Return whether the job of an item, or of a question, is placed here, or nowhere yet.

        Nothing is known here of one that was placed in another folder or on another machine of this name.
        """
        place = wanted.get("place")
        return place is None or all(
            self._place[name] == place[name] for name in ("machine", "folder", "mark")
        )

    def report(self) -> dict[str, Any]:
        """Return where the jobs are, and their states, for a report."""
        with self._lock:
            runs = runs_to_tell(self._states, self._items)
        return {"place": self._place, "runs": runs}

    def output(self, key: str, offset: int) -> dict[str, Any]:
        """Return a part of a job's output, as `job_states.logs` does; before 0, from so many bytes on."""
        first, size = long_logs.kept_part(self._log_of(key))
        if offset < 0:
            offset = max(size + offset, first)
        found = job_states.logs(self._root, key, max(offset, first))
        if offset < first:
            said = f"gpu-manager: the first {first:,} bytes of this output are not kept any more\n"
            found["text"] = said + found["text"]
        return found

    def close(self) -> None:
        """Stop looking; the jobs go on."""
        self._stop.set()
        self._thread.join()
        for pool in (self._starting, self._ending):
            pool.shutdown(wait=False, cancel_futures=True)
        os.close(self._held)

    # ---- this server's side ----

    def _run(self) -> None:
        trouble = ""
        while not self._stop.wait(TICK_S):
            try:
                if self._has_changed():
                    self._changed()
                self._converge()
                if time.monotonic() - self._cut_at > CUT_EVERY_S:
                    self._cut_at = time.monotonic()
                    self._cut()
                if time.monotonic() - self._pruned_at > PRUNE_EVERY_S:
                    self._pruned_at = time.monotonic()
                    self._prune()
                trouble = ""
            except Exception as error:  # a full disk, a folder that is gone, no more threads, no memory
                before, trouble = trouble, str(error) or type(error).__name__
                if trouble != before:
                    self._say(f"its jobs cannot be seen: {trouble}")
                self._stop.wait(10 * TICK_S)

    def _converge(self) -> None:
        self._acts = {key: act for key, act in self._acts.items() if not act.done()}
        with self._lock:
            items = list(self._items.values())
        for item in items:
            key = item["key"]
            if key not in self._acts and not self._is_done(item):
                pool = self._starting if item["want"] in ("prepare", "run") else self._ending
                self._acts[key] = pool.submit(self._carry_out, item)
        for key, found in self._states.items():  # whose grace ends while no service answers, too
            if found["state"] == "running" and found["preempted"] and key not in self._acts:
                self._acts[key] = self._ending.submit(ending.preempt, self._root, key, 0.0)

    def _is_done(self, item: Mapping[str, Any]) -> bool:
        done = self._done.get(item["key"])
        if done is None or (done["want"], done["n"]) != (item["want"], item["n"]):
            return False
        if "again_at" in done and not item["n"]:  # nobody orders it again under another number
            return time.monotonic() < float(done["again_at"])
        state = self._states.get(item["key"], {}).get("state")
        return item["want"] != "preempt" or state != "running"  # whose grace may be over

    def _carry_out(self, item: Mapping[str, Any]) -> None:
        key, want = item["key"], item["want"]
        done: dict[str, Any] = {**NOT_DONE, "want": want, "n": item["n"]}
        try:
            done["began"] = self._act(key, want, item)
        except job_files.RefusedError as error:
            done.update(error=str(error)[:400], refusal=type(error).__name__)
        except Exception as error:
            reason = str(error)[:400] or type(error).__name__
            done.update(error=reason, refusal="", again_at=time.monotonic() + AGAIN_S)
        with suppress(OSError):  # it has none, or has put something else there
            done["walls"] = as_reason(job_files.text_of(self._walls_file(key)))
        with self._lock:
            self._done[key] = done

    def _act(self, key: str, want: str, item: Mapping[str, Any]) -> bool | None:
        """Do what is wanted; return of a start whether it began the job."""
        root, grace_s = self._root, float(item.get("grace_s") or 0.0)
        match want:
            case "prepare":
                self._prepare(key, item)
            case "run":
                if job_states.status(root, key)["state"] != "absent":
                    return False
                try:
                    before = self._prepare(key, item)
                except OSError as error:  # a full disk, a folder that cannot be written
                    raise job_files.NotStartedError(f"job {key} cannot be started: {error}") from error
                spec = item["spec"]
                command, environment, files = spec["command"], spec["environment"], spec.get("files") or {}
                started = starting.start(root, key, command, environment, _home(), files, before)
                return bool(started["began"])
            case "terminate":
                if item.get("bury") is True and job_states.status(root, key)["state"] == "absent":
                    job_files.bury(root, key)
                ending.terminate(root, key, grace_s)
            case "preempt":
                ending.preempt(root, key, grace_s, str(item.get("signal") or "TERM"))
            case "stop":
                ending.stop(root, key, grace_s, keep=item.get("keep") is True)
            case "forget":
                job_files.bury(root, key)
                if job_states.status(root, key)["state"] == "absent":
                    ending.remove(root, key)  # it never began: there is no output to keep
        return None

    def _prepare(self, key: str, item: Mapping[str, Any]) -> list[str]:
        """Make ready what a start needs; return what comes before the command: it puts that within walls."""
        self._check(key, item)
        spec = item["spec"]
        if spec.get("user") not in (None, "", self.user):
            raise job_files.NotStartedError(
                f"jobs of this team run as user {spec['user']}, but the agent of {self._server} runs them as "
                f"{self.user}"
            )
        confine, program = spec.get("confine") or "off", list(spec.get("walls") or ())
        check = [] if confine == "off" else [*program, walls.CHECK]
        port = int(spec.get("port") or 0) if item["want"] == "prepare" else 0
        missing = starting.prepare(self._root, key, port, check)["walls"]
        running = [name for name, found in self._states.items() if found["state"] == "running"]
        try:
            check_no_other_lease(key, running, self._server)
            achieved = walls_of(confine, missing, self._server)
        except LauncherError as error:
            raise job_files.NotStartedError(str(error)) from error
        if confine == "off":
            return []
        job_files.write_file(self._walls_file(key), achieved)  # an agent may be started again
        return [sys.executable, *(walls.telling(missing) if missing else program)]

    def _check(self, key: str, item: Mapping[str, Any]) -> None:
        """Raise `NotStartedError` for a job that this agent must not start."""
        user = item.get("user") or ""
        if user != self.user:
            raise job_files.NotStartedError(
                f"this agent runs jobs as {self.user}, and the cluster says job_user = {user!r}: start it as "
                "that user, or correct the cluster"
            )
        token = token_of_key(key)
        if token != item["token"]:
            raise job_files.NotStartedError(f"job {key} is not of fencing token {item['token']}")
        names = (*job_files.jobs_in(self._root), *job_files.ended_in(self._root))
        later = [job_files.lease_of_key(name) for name in names if token_of_key(name) > token]
        if job_files.lease_of_key(key) in later:
            raise job_files.NotStartedError(f"a later lease than that of job {key} was here")

    def _has_changed(self) -> bool:
        """Return whether any job is other than it was at the last call."""
        with self._lock:
            keys = {*job_files.jobs_in(self._root)}
            for key in self._done.keys() - keys - self._items.keys():
                del self._done[key]
            over = {key for key in keys - self._items.keys() if self._is_over(key)}
            keys |= self._items.keys()
            done = dict(self._done)
        states = {
            key: self._states[key] if key in over else self._state(key, done.get(key, {})) for key in keys
        }
        with self._lock:
            is_other = states != self._states
            self._states = states
        return is_other

    def _is_over(self, key: str) -> bool:
        """Return whether nothing of a job changes any more: most of those whose output is kept."""
        state = self._states.get(key)
        return state is not None and state["ended"] and state["state"] == "finished"

    def _state(self, key: str, done: Mapping[str, Any]) -> dict[str, Any]:
        before = self._states.get(key)
        was_over = before is not None and before["state"] == "finished"
        found: dict[str, Any] = {"key": key, "last_line": ""}
        try:
            found |= job_states.status(self._root, key)
            if found["state"] == "finished" and not was_over:
                found |= self._ending_rest(key, is_new=before is None)
        except OSError as error:  # the job put something else there: it may run
            found |= {**STILL_RUNS, "checkpoint_at": None, "preempted": False}
            done = {"error": str(error)[:400], **done}
        if before is not None and was_over and found["state"] == "finished":
            found["last_line"] = before["last_line"]
        elif found["state"] == "finished":
            with suppress(OSError):  # the job put something else there
                lines = job_states.tail(self._root, key, LAST_LINE_BYTES)["text"].strip().splitlines() or [""]
                found["last_line"] = lines[-1].strip()
        order = {name: done.get(name, usual) for name, usual in NOT_DONE.items()}
        is_ended = job_files.exists(job_files.tombstone_of(self._root, key))
        return {**found, **order, "ended": is_ended}

    def _ending_rest(self, key: str, *, is_new: bool) -> dict[str, Any]:
        """End what a job left behind, such as a process in the background; return how it is until then.

        For a job that is new to this agent not every process of the machine is read: there may be thousands.
        """
        directory = job_files.directory_of(self._root, key)
        is_known = not is_new or key in self._marked or job_processes.has_group(directory)
        if (ending.is_gone if is_known else job_files.is_free)(directory):
            return {}
        act = self._acts.get(key)
        if act is None or act.done():
            self._acts[key] = self._ending.submit(ending.terminate, self._root, key)
        return STILL_RUNS

    def _walls_file(self, key: str) -> str:
        return os.path.join(job_files.directory_of(self._root, key), "walls")

    def _log_of(self, key: str) -> str:
        return os.path.join(job_files.directory_of(self._root, key), "log")

    def _cut(self) -> None:
        """Drop the oldest output of jobs that run and have written too much."""
        running = {key for key, found in self._states.items() if found["state"] == "running"}
        self._uncuttable &= running
        for key in running - self._uncuttable:
            try:
                long_logs.cut(self._log_of(key))
            except FileNotFoundError:
                continue
            except OSError as error:  # a file system without holes, or the job put something else there
                self._uncuttable.add(key)
                self._say(f"the output of job {key} cannot be kept short: {error}")

    def _prune(self) -> None:
        with self._lock:
            wanted = {key for key, item in self._items.items() if item["want"] != "forget"}
        over = {
            key: found
            for key, found in self._states.items()
            if found["state"] == "finished" and key not in wanted
        }
        old_outputs.remove_old(self._root, over, self._say)
        unbegun = [key for key, found in self._states.items() if found["state"] == "absent"]
        old_outputs.remove_unbegun(self._root, (key for key in unbegun if not is_key(key)))  # of no service


def _home() -> str:
    """Return the folder in which jobs begin: this user's home, as over ssh, or if it has none that of now."""
    home = os.path.expanduser("~")
    return home if os.path.isdir(home) else "."
