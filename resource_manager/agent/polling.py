"""Standing question of an agent to its service: which jobs should be on this server."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from resource_manager import __version__
from resource_manager.agent.job_runner import AgentJobs
from resource_manager.agent.sending import NoAnswerError, ReportSender, spread

WAIT_S = 45.0
"""Time for which the service holds the question while nothing changes; each costs it what a report does.

Most proxies wait for 50 s or a minute.
"""

SHORT_WAIT_S = 25.0
"""That time where a proxy gives up sooner."""

MARGIN_S = 10.0
FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 30.0


class JobPoll:
    """Thread that asks for the jobs of this server, has them made so, and sends output that was asked for.

    It begins at the first `ask_again`: what is offered goes by the place that was reported.
    """

    def __init__(
        self,
        server: str,
        sender: ReportSender,
        jobs: AgentJobs,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._sender, self._jobs, self._say = server, sender, jobs, say
        self._clock = clock
        self._known = ""
        self._recent: deque[str] = deque(maxlen=4)
        self._repeats = 0
        self._wait_s = WAIT_S
        self._trouble = ""
        self._sent: set[str] = set()
        self._stop = threading.Event()
        self._again = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-jobs-poll", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more; a question that is being held ends with this process."""
        self._stop.set()
        self._again.set()

    def ask_again(self) -> None:
        """End the time before the first question, or a pause after a failure: a service took a report."""
        self._again.set()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        self._again.wait()
        while True:
            self._again.clear()  # before the question: a wake while it fails ends the pause after it
            if self._stop.is_set():
                return
            try:
                self._round()
                pause_s, trouble = FIRST_PAUSE_S, ""
            except Exception as error:  # of memory, too: else this server reports, and begins no job any more
                trouble = str(error) or type(error).__name__
                self._again.wait(pause_s * (0.5 + spread.random()))
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
            if trouble and trouble != self._trouble:
                self._say(trouble)
            self._trouble = trouble

    def _round(self) -> None:
        query = urlencode(
            {"server": self._server, "known": self._known, "wait": self._wait_s, "version": __version__}
        )
        asked_at = self._clock()
        try:
            answer = self._sender.ask("GET", f"/agent/jobs?{query}", timeout_s=self._wait_s + MARGIN_S)
        except NoAnswerError:
            if self._clock() - asked_at >= SHORT_WAIT_S:
                self._wait_s = SHORT_WAIT_S
            raise
        if "jobs" not in answer:
            return
        known = str(answer["known"])
        self._repeats = self._repeats + 1 if known in self._recent else 0
        self._recent.append(known)
        self._jobs.take(answer)
        wanted = {asked["n"]: asked for asked in answer["output"] if self._jobs.is_here(asked)}
        self._sent &= wanted.keys()
        for number in wanted.keys() - self._sent:
            self._send_output(wanted[number])
            self._sent.add(number)
        self._known = known  # not before all output is sent: what was refused is wanted still
        if self._repeats > 1:  # services in turn that see it differently, as with other keys or versions
            self._again.wait(FIRST_PAUSE_S)

    def _send_output(self, question: dict[str, Any]) -> None:
        try:
            part = self._jobs.output(question["key"], int(question["offset"]))
        except OSError as error:
            part = {"error": str(error)[:400]}
        body = {"server": self._server, "key": question["key"], "n": question["n"], "part": part}
        self._sender.ask("POST", "/agent/logs", body)
