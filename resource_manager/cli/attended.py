"""Job in this terminal: placed in its lease, attended until it ends, told what its lease is told."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

from resource_manager.cli.base import REFUSED, UNREACHABLE, Failure
from resource_manager.cli.by_agent import AgentProcess, AgentTerminal
from resource_manager.cli.endings import (
    GPU_FAILED,
    PREEMPTED,
    TERMINATED,
    TIMED_OUT,
    Ending,
    ending_by_itself,
)
from resource_manager.cli.session import Session, is_refused, say
from resource_manager.cli.shared_connection import SharedConnection
from resource_manager.cli.signals import Calls, Interrupted
from resource_manager.cli.syncing import sync
from resource_manager.core.changes import JobEnd, Outcome
from resource_manager.core.identifiers import as_reason
from resource_manager.core.models import JobPlace
from resource_manager.errors import LeaseNotFoundError, NewerFormatError, ResourceManagerError
from resource_manager.jobs.job_preemption import grace_of, is_time_over
from resource_manager.jobs.launchers import Job, JobStatus, LauncherError, LauncherUnreachableError, terminal
from resource_manager.jobs.launchers.registry import TERMINAL
from resource_manager.jobs.launchers.terminal import SignedLauncher
from resource_manager.manager.answer_words import duration, name_in_words
from resource_manager.manager.plurals import counted
from resource_manager.manager.use_results import IdleWarning

TTL_S = 60.0
"""TTL of a lease that a terminal renews; its job ends this long after the last sign of this program."""

SIGN_EVERY_S = RENEW_EVERY_S = 15.0
ASK_EVERY_S = 3.0
"""Seconds between two looks at the lease; every fifth one renews it, the others only read."""

LOOK_EVERY_S, LOOK_AT_GPUS_EVERY_S = 1.0, 30.0
PREEMPT_STEP_S, WARN_AT = 5.0, 0.9
GRACE_S, CLOSE_S, END_S = 10.0, 1.0, 4.0
"""The last is the time beyond the grace in which a job must be known to be gone."""


class Attended:
    """Job of a lease in this terminal; with `owns` the lease is renewed meanwhile and released at its end.

    It begins in a copy of `folder`, if one is given. `by_agent`: where nobody can log in to the server, its
    agent may run the job, which then gets no input.
    """

    def __init__(
        self,
        session: Session,
        lease: Mapping[str, Any],
        job: Job,
        time_s: float | None,
        *,
        owns: bool = True,
        folder: Path | None = None,
        by_agent: bool = False,
    ) -> None:
        self._session = session
        self._signals = session.signals
        self._lease = lease
        self._job = job
        self._time_s = time_s
        self._owns = owns
        self._folder = folder
        self._may_go_by_agent = by_agent
        self._server: str = lease["members"][0]["server_name"]
        self._address: str = lease["members"][0]["address"]
        self._lease_id, self._token = lease["task_id"], lease["fencing_token"]
        self._has_agent = bool(lease["members"][0]["job_user"])
        by_hand = f"; its agent runs jobs: gpu-manager submit NAME --server {self._server} …"
        self._hint = by_hand if self._has_agent else ""
        """What else runs a command on the server, though nobody logs in there."""
        self._here = self._is_placed = self._is_warned = self._is_silent = False
        self._process: subprocess.Popen[bytes] | AgentProcess
        self._signing, self._telling, self._ending = (Calls(self._signals) for _ in range(3))
        now = time.monotonic()
        self._signed_at = self._asked_at = self._renewed_at = self._begun_at = self._gpus_seen_at = now
        self._asked: Future[Mapping[str, Any] | None] | None = None
        self._preemption = ""
        self._idle = IdleWarning(say)

    def run(self) -> int:
        """Run the job until it ends, which Ctrl-Z does not stop; return its exit code."""
        with self._signals.not_stopped(), ExitStack() as connection:
            renewing = self._session.repeating(self._renewed, RENEW_EVERY_S) if self._owns else nullcontext()
            with renewing:  # a log-in that asks for a password, and copying code, may take long
                launcher = self._begun(connection)
            return self._attend(launcher)

    def _begun(self, connection: ExitStack) -> SignedLauncher:
        """Start the job; its lease is released where that fails."""
        try:
            self._here = self._is_here()
            try:
                return self._begun_there(connection)
            except LauncherError as error:
                if not self._can_go_by_agent(error):
                    raise
                say(f"{error}; its agent runs the command, which gets no input from here")
                self._hint = ""
                return self._begun_by_agent()
        except LauncherError as error:
            self._release(Outcome.FAILED, str(error), (self._server,))
            is_unknown = isinstance(error, LauncherUnreachableError)
            hint = self._hint if is_unknown or not self._address else ""
            raise Failure(f"{error}{hint}", UNREACHABLE if is_unknown else REFUSED) from error
        except BaseException:
            self._release(Outcome.EVICTED if self._preemption else Outcome.CANCELLED, self._preemption)
            raise

    def _begun_there(self, connection: ExitStack) -> SignedLauncher:
        """Start the job on its server, in a log-in or on this machine."""
        options = self._log_in(connection)
        working_dir = self._copy(options)
        launcher = terminal.open_terminal(JobPlace(TERMINAL, self._address), self._here, options)
        place = self._prepared(launcher)
        self._process = terminal.attend(place, self._job, self._here, TTL_S, options, working_dir)
        return launcher

    def _begun_by_agent(self) -> SignedLauncher:
        """Have the agent of the server start the job, and show its output from now on."""
        launcher = AgentTerminal(JobPlace("agent", self._server))
        self._prepared(launcher)
        try:
            self._signals.result(self._telling.begin(lambda: launcher.start(self._job)))
        except BaseException:  # it may have begun all the same
            self._owns = self._is_gone(launcher)
            raise
        self._process = AgentProcess(launcher, self._job.key)
        return launcher

    def _is_gone(self, launcher: SignedLauncher) -> bool:
        """Stop the job, and return whether it is known to be gone; say so if it is not."""
        call = self._ending.begin(lambda: launcher.stop(self._job.key, 0.0))
        settled = self._signals.is_settled(call, END_S, END_S)
        if settled and call.exception() is None:
            return True
        self._say_it_may_run(str(call.exception() if settled else "its agent does not answer in time"))
        return False

    def _prepared(self, launcher: SignedLauncher) -> JobPlace:
        """Return where the job is about to be, which its lease then says, too."""
        place = self._signals.result(self._telling.begin(lambda: launcher.prepare(self._job)))
        if self._owns:
            self._place(place)
            self._is_placed = True
        self._signals.check()
        return place

    def _can_go_by_agent(self, error: LauncherError) -> bool:
        """Return whether the agent may run a job that could be placed nowhere, as nobody can log in."""
        is_unknown = isinstance(error, LauncherUnreachableError)
        return (
            self._may_go_by_agent
            and not self._is_placed
            and self._folder is None
            and (is_unknown or not self._address)
            and self._has_agent
        )

    def _is_here(self) -> bool:
        """Return whether the server is this machine, as its agent says where one reports."""
        machine = None
        with suppress(ResourceManagerError):
            uses = self._session.ask(lambda manager: manager.gpus([self._server]))
            machine = uses[0]["machine"]
        return terminal.is_here(self._address, self._server, machine=machine)

    def _log_in(self, connection: ExitStack) -> tuple[str, ...]:
        """Return the options of the ssh program with which its calls share one log-in; none here."""
        if self._here:
            return ()
        if not self._address:
            raise LauncherError(
                f"server {self._server} has no address in the inventory, so no ssh can reach it"
            )
        connection.callback(self._settle)
        return connection.enter_context(SharedConnection(self._address, self._signals)).options

    def _settle(self) -> None:
        """Wait for what shared the log-in, which has ended with it or is about to."""
        for calls in (self._signing, self._telling, self._ending):
            calls.settle(CLOSE_S)

    def _copy(self, options: tuple[str, ...]) -> str:
        """Return the folder of the code on the server, copied there unless that is this machine."""
        if self._folder is None or self._here:
            return str(self._folder or "")
        folder = self._folder
        there, sent = self._signals.result(self._telling.begin(lambda: sync(folder, self._address, options)))
        say(f"{counted(sent, 'file')} copied to {there} of {self._server}")
        return there

    def _place(self, place: JobPlace) -> None:
        """Store in the lease where its job is about to be; raises `Interrupted` if it is taken by now."""
        lease = self._session.ask_patiently(
            lambda manager: manager.place_job(self._lease_id, [place], fencing_token=self._token), TTL_S / 2
        )
        if lease["preempted_by"]:
            is_over = is_time_over(lease)
            say(f"{lease['reason']} before its command began{'' if is_over else ': run it again'}")
            self._preemption = lease["reason"]
            raise Interrupted(TIMED_OUT if is_over else PREEMPTED)

    def _attend(self, launcher: SignedLauncher) -> int:
        """Return the exit code of the job that runs now, once all that is to be done after it is done."""
        ending = self._watch(launcher)
        status, unknown = self._end(launcher)
        if unknown is None:
            self._release(ending.outcome, ending.reason)
        elif self._owns:
            self._say_it_may_run(str(unknown))
        else:
            say(f"the command on {self._server} may still run, for {TTL_S:g} s at most: {unknown}")
        if (
            not self._here
            and isinstance(self._process, subprocess.Popen)
            and ending.exit_code == terminal.SSH_FAILED
            and (status is None or status.exit_code != ending.exit_code)
        ):
            raise Failure(f"server {self._server} does not answer by ssh", UNREACHABLE)
        return ending.exit_code

    def _say_it_may_run(self, why: str) -> None:
        say(
            f"{name_in_words(self._lease)}: its job on {self._server} may still run: {why}; its GPUs stay "
            f"allocated until it is known to be gone: gpu-manager stop {self._lease['short_id']}, once the "
            "server is back"
        )

    def _watch(self, launcher: SignedLauncher) -> Ending:
        """Return the end of the job: its own, or that which its lease, its time or a signal demands."""
        try:
            self._signals.check()
            while (code := self._process.poll()) is None:
                if (ending := self._mind_time() or self._mind_lease()) is not None:
                    return ending
                self._mind_job(launcher)
                self._signals.wait(LOOK_EVERY_S)
                self._signals.check()
        except Interrupted as interrupted:
            return Ending(interrupted.code, Outcome.CANCELLED)
        return ending_by_itself(code, self._lease, self._preemption)

    def _mind_time(self) -> Ending | None:
        if self._time_s is None:
            return None
        left_s = self._begun_at + self._time_s - time.monotonic()
        if left_s <= (1 - WARN_AT) * self._time_s and not self._is_warned:
            say(f"{duration(max(left_s, 0))} left of the {duration(self._time_s)}")
            self._is_warned = True
        if left_s > 0:
            return None
        say("its time is over")
        return Ending(TIMED_OUT, Outcome.FAILED, "its time was over")

    def _mind_lease(self) -> Ending | None:
        """Ask how the lease is, or renew it where that is due, and return the end that it demands."""
        now = time.monotonic()
        if self._asked is None:
            if now - self._asked_at >= (ASK_EVERY_S if self._owns else LOOK_EVERY_S):
                self._asked_at = now
                self._asked = self._session.begin(self._current_lease)
                self._session.begin(self._look_at_gpus)
            return None
        if not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        try:
            found = asked.result()
        except LeaseNotFoundError:
            say(self._ended())
            return Ending(TERMINATED, Outcome.CANCELLED, self._ended())
        except ResourceManagerError as error:
            if is_refused(error) and isinstance(self._process, AgentProcess):  # which ends it without lease
                say(f"{error}; its agent ends the command {TTL_S:g} s after the last renewal")
                return Ending(TERMINATED, Outcome.CANCELLED)
            if not self._is_silent:
                say(f"the lease could not be renewed: {error}; the job goes on, and its GPUs stay allocated")
            self._is_silent = True
            return None
        if self._is_silent:
            say("the lease is renewed again")
        self._is_silent = False
        return self._heard(found)

    def _current_lease(self, manager: Any) -> Mapping[str, Any] | None:
        """Return the lease, renewed where it is due.

        A state that a newer version wrote is not read, but the lease is renewed there.
        """
        if self._owns and time.monotonic() - self._renewed_at >= RENEW_EVERY_S:
            return self._renewed(manager)
        try:
            found: Mapping[str, Any] | None = manager.status_of(self._lease_id)
        except NewerFormatError:
            if not self._owns:
                raise
            return self._lease
        return found

    def _renewed(self, manager: Any) -> Mapping[str, Any]:
        lease: Mapping[str, Any] = manager.renew(self._lease_id, fencing_token=self._token)
        self._renewed_at = time.monotonic()
        return lease

    def _look_at_gpus(self, manager: Any) -> None:
        """Say, once, that the GPUs compute nothing and are soon released for it, or have long done so."""
        if not self._owns or time.monotonic() - self._gpus_seen_at < LOOK_AT_GPUS_EVERY_S:
            return
        self._gpus_seen_at = time.monotonic()
        with suppress(ResourceManagerError):  # the lease's own look says what is wrong
            gpus = (gpu for server in manager.gpus([self._server]) for gpu in server["gpus"])
            self._idle.see(gpus, self._lease_id)

    def _heard(self, lease: Mapping[str, Any] | None) -> Ending | None:
        """Tell what the lease says of itself; return the end if that is one."""
        if lease is None or lease.get("fencing_token") != self._token or lease["revoked"]:
            say(self._ended())
            return Ending(TERMINATED, Outcome.CANCELLED, "its lease was ended")
        if lease["gpu_failed"]:
            say(f"a GPU of the lease failed: {lease['gpu_failed']}; its job is ended")
            return Ending(GPU_FAILED, Outcome.FAILED, f"a GPU failed: {lease['gpu_failed']}")
        if lease["preempted_by"] and not self._preemption:
            self._preemption, self._lease = lease["reason"], lease
            left_s = grace_of(lease)
            say(f"{self._preemption}; the job has {left_s:.0f} s to save what it did")
        return None

    def _ended(self) -> str:
        return f"the lease {name_in_words(self._lease)} was ended"

    def _mind_job(self, launcher: SignedLauncher) -> None:
        """Let the job's server know that this program is there, and the job that its lease is taken."""
        now, key = time.monotonic(), self._job.key
        if now - self._signed_at >= SIGN_EVERY_S and not self._signing.is_busy:
            self._signed_at = now
            self._signing.begin(lambda: launcher.sign(key))
        if self._preemption and not self._telling.is_busy:
            grace_s, signal_name = grace_of(self._lease), self._lease["preempt_signal"]
            self._telling.begin(lambda: launcher.preempt(key, grace_s, signal_name, PREEMPT_STEP_S))

    def _end(self, launcher: SignedLauncher) -> tuple[JobStatus | None, Exception | None]:
        """End what is left of the job; return how it was, and why it may still run, None if it is gone."""

        def end() -> JobStatus:
            status = launcher.status(self._job.key)
            launcher.stop(self._job.key, GRACE_S)
            return status

        call = self._ending.begin(end)
        settled = self._signals.is_settled(call, GRACE_S + END_S, GRACE_S + END_S)
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
            self._process.kill()
            self._process.wait()
        if not settled:
            return None, LauncherUnreachableError(f"server {self._server} does not answer in time")
        try:
            return call.result(), None
        except LauncherError as error:
            return None, error

    def _release(self, outcome: Outcome, reason: str = "", failed_nodes: tuple[str, ...] = ()) -> None:
        """Release the lease, whose job is known to be gone."""
        if not self._owns:
            return
        self._session.give_back(
            self._lease_id,
            lambda manager: manager.release(
                self._lease_id,
                fencing_token=self._token,
                outcome=outcome,
                job_end=JobEnd.ENDED,
                reason=as_reason(reason),
                failed_nodes=failed_nodes,
            ),
        )
