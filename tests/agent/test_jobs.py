"""Jobs of an agent: what it starts, and what it refuses whatever a service, or an old answer, says."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from resource_manager.agent import job_runner, long_logs, old_outputs
from resource_manager.agent.job_runner import AgentJobs, OtherAgentError
from resource_manager.agent.probe import MAX_JOBS
from resource_manager.agent.report_format import check_report, read_report
from resource_manager.jobs.directories import ending, job_files, job_states, starting
from resource_manager.jobs.launchers import job_key
from tests.agent.reporting import as_text, gpu
from tests.agent.reporting import report as reported
from tests.eventually import wait_for

Open = Callable[..., AgentJobs]

SAVES = "trap 'echo saved; exit 9' TERM; while :; do sleep 0.1; done"


class Service:
    """What a service says to an agent: each answer is of a later state, unless a version is given."""

    def __init__(self, jobs: AgentJobs) -> None:
        self.jobs = jobs
        self.version = 0

    def say(
        self, *items: dict[str, Any], version: int = 0, server: str = "here", incarnation: str = "2"
    ) -> None:
        self.version = version or self.version + 1
        answer = {"server": server, "incarnation": incarnation, "version": self.version, "jobs": list(items)}
        self.jobs.take(answer)

    def run(self, key: str, command: str, **more: Any) -> dict[str, Any]:
        spec = {"command": ["/bin/sh", "-c", command], "environment": {}}
        token = int(key.rpartition("-")[2].partition(".")[0])
        return {
            "key": key,
            "want": "run",
            "n": "",
            "token": token,
            "user": self.jobs.user,
            "spec": spec,
            **more,
        }

    def state(self, key: str) -> dict[str, Any]:
        return next((run for run in self.jobs.report()["runs"] if run["key"] == key), {})

    def wait(self, key: str, **known: Any) -> dict[str, Any]:
        wait_for(lambda: known.items() <= self.state(key).items(), 10)
        return self.state(key)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    made: list[AgentJobs] = []

    def open_(**more: Any) -> AgentJobs:
        root = str(tmp_path / "jobs")
        made.append(AgentJobs("here", root, **{"changed": lambda: None, "say": lambda line: None, **more}))
        return made[-1]

    yield open_
    made[-1].close()


@pytest.fixture
def service(opened: Open) -> Service:
    return Service(opened())


def test_a_job_runs_once_and_its_end_is_told(service: Service, tmp_path: Path) -> None:
    key, count = job_key("t", 7), tmp_path / "count"
    wanted = service.run(key, f"echo x >> {count}; echo last; exit 3")
    for _ in range(3):  # a lost answer is one more of them
        service.say(wanted)
        ended = service.wait(key, state="finished")
    assert (ended["exit_code"], ended["last_line"]) == (3, "last")
    assert count.read_text() == "x\n"


@pytest.mark.parametrize("has_home", [True, False])
def test_a_job_begins_at_home_as_over_ssh_if_there_is_one(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_home: bool
) -> None:
    """The agent's own folder is `/` where systemd started it, and nothing of a user's is there."""
    home, key = tmp_path / "home", job_key("t", 7)
    if has_home:
        home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    service.say(service.run(key, "pwd"))
    ended = service.wait(key, state="finished")
    assert (ended["exit_code"], ended["last_line"]) == (0, str(home) if has_home else os.getcwd())


def test_a_restarted_agent_finds_its_jobs_and_starts_none_again(opened: Open, tmp_path: Path) -> None:
    first, key, count = Service(opened()), job_key("t", 7), tmp_path / "count"
    wanted = first.run(key, f"echo x >> {count}; sleep 60")
    first.say(wanted)
    first.wait(key, state="running", want="run")
    first.jobs.close()
    second = Service(opened())
    assert second.state(key)["state"] == "running", "silence of the service stops nothing"
    second.say(wanted)
    second.wait(key, want="run")
    assert count.read_text() == "x\n"
    second.say({"key": key, "want": "stop", "n": "1", "grace_s": 0})
    second.wait(key, state="absent", ended=True)


def test_a_job_is_told_until_it_is_gone_also_by_an_agent_that_was_restarted_within_its_grace(
    opened: Open, tmp_path: Path
) -> None:
    """Its tombstone was there before its end: with no word of it, it would run on beside the next lease."""
    first, key = Service(opened()), job_key("t", 7)
    first.say(first.run(key, "sleep 600"))
    first.wait(key, state="running", want="run")
    job_files.bury(str(tmp_path / "jobs"), key)
    first.jobs.close()
    second = Service(opened())
    assert second.wait(key, ended=True)["state"] == "running"
    second.say({"key": key, "want": "stop", "n": "", "grace_s": 0, "keep": True})
    second.wait(key, state="finished")
    second.say()
    assert second.state(key) == {}


def test_a_restarted_agent_ends_what_a_job_left_without_a_mark_of_it(opened: Open, tmp_path: Path) -> None:
    first, key = Service(opened()), job_key("t", 7)
    go, left = tmp_path / "go", tmp_path / "left"
    leaves = "import subprocess; print(subprocess.Popen(['sleep', '60'], env={}).pid, flush=True)"
    wait = f"while [ ! -e {go} ]; do sleep 0.02; done"
    first.say(first.run(key, f"{sys.executable} -c {shlex.quote(leaves)} > {left}; {wait}"))
    wait_for(lambda: left.exists() and left.read_text())
    first.jobs.close()
    go.touch()
    wait_for((tmp_path / "jobs" / key / "exit_code").exists)
    Service(opened()).wait(key, state="finished")
    line = Path(f"/proc/{left.read_text().strip()}/cmdline")
    assert not (line.exists() and line.read_text()), "it is gone, or nobody has waited for it"


def test_an_old_answer_and_one_for_another_server_are_not_followed(service: Service) -> None:
    key, later = job_key("t", 7), job_key("u", 8)
    service.say(service.run(key, "sleep 60"), version=9)
    service.wait(key, state="running")
    for old in ({"version": 8}, {"version": 99, "incarnation": "1"}, {"version": 99, "server": "there"}):
        service.say({"key": key, "want": "stop", "n": "", "grace_s": 0}, service.run(later, "true"), **old)
    service.say(service.run(key, "sleep 60"), version=10)
    service.wait(key, want="run")
    assert service.state(key)["state"] == "running"
    assert service.state(later) == {}
    service.say({"key": key, "want": "stop", "n": "", "grace_s": 0})
    service.wait(key, state="absent")


def test_a_restarted_agent_follows_no_answer_older_than_what_the_one_before_knew(
    opened: Open, tmp_path: Path
) -> None:
    """As of a store that was set back to a dump, and lacks the lease of its job."""
    service, key, other = Service(opened(newest=("2", 9))), job_key("t", 7), job_key("u", 8)
    service.say(service.run(key, "true"), version=8)
    add_finished(tmp_path / "jobs" / other)
    service.wait(other, state="finished")  # so the jobs were looked at since
    assert service.state(key) == {}
    service.say(service.run(key, "true"), version=9)
    service.wait(key, state="finished")


def add_finished(folder: Path, output: str = "") -> None:
    """Make the folder of a job that is over."""
    folder.mkdir(parents=True)
    for name, text in (("lock", ""), ("log", output), ("group", "1"), ("exit_code", "0")):
        (folder / name).write_text(text)


def test_ended_stays_ended(service: Service) -> None:
    key = job_key("t", 7)
    service.say({"key": key, "want": "stop", "n": "", "grace_s": 0})
    service.wait(key, ended=True, want="stop")
    service.say(service.run(key, "true"))
    refused = service.wait(key, want="run")
    assert (refused["refusal"], refused["state"]) == ("AlreadyEndedError", "absent")


def test_a_job_whose_output_is_kept_is_not_looked_at_any_more(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a thousand of them, and ten looks a second."""
    over, runs, looks = job_key("t", 7), job_key("u", 8), Counter[str]()
    service.say(service.run(over, "echo done"))
    service.wait(over, state="finished")
    service.say({"key": over, "want": "forget", "n": ""})
    service.wait(over, ended=True)
    status = job_states.status

    def counted(root: str, key: str) -> dict[str, Any]:
        looks[key] += 1
        return status(root, key)

    service.say(service.run(runs, "sleep 60"))
    service.wait(runs, state="running")
    monkeypatch.setattr(job_states, "status", counted)
    wait_for(lambda: looks[runs] > 3)
    assert looks[over] == 0
    assert service.jobs.output(over, 0)["text"] == "done\n"


def test_a_job_that_is_over_before_it_began_never_begins(
    opened: Open, service: Service, tmp_path: Path
) -> None:
    """Else its lease could end by a report of before, while it begins."""
    key = job_key("t", 7)
    service.say({**service.run(key, ""), "want": "terminate", "bury": True})
    service.wait(key, state="absent", want="terminate", ended=True)
    service.jobs.close()
    again = Service(opened())  # which knows of no answer of before
    again.say(again.run(key, f"touch {tmp_path}/begun"))
    again.wait(key, state="absent", refusal="AlreadyEndedError")


def test_the_output_of_a_stopped_job_stays_where_nobody_else_has_it(service: Service) -> None:
    key = job_key("t", 7)
    service.say(service.run(key, f"echo begun; {SAVES}"))
    wait_for(lambda: service.jobs.output(key, 0)["text"] == "begun\n")
    service.say({"key": key, "want": "stop", "n": "", "grace_s": 5, "keep": True})
    ended = service.wait(key, state="finished", want="stop")
    assert (ended["exit_code"], ended["last_line"], ended["ended"]) == (9, "saved", True)
    assert service.jobs.output(key, 0)["text"].startswith("begun\n")
    service.say(service.run(key, "true", n="2"))
    assert service.wait(key, n="2")["refusal"] is None
    assert service.state(key)["exit_code"] == 9, "it is not started again"


def test_no_job_starts_under_a_lower_token_or_another_one(service: Service) -> None:
    newer, older = job_key("t", 8), job_key("t", 7)
    service.say(service.run(newer, "true"))
    service.wait(newer, state="finished")
    service.say(service.run(newer, "true"), service.run(older, "true"))
    assert "a later lease than that of job" in service.wait(older, refusal="NotStartedError")["error"]
    other = job_key("u", 9)
    service.say(service.run(other, "true", token=10))
    assert "not of fencing token 10" in service.wait(other, refusal="NotStartedError")["error"]


def test_no_job_starts_as_another_user_than_the_cluster_says(service: Service) -> None:
    key = job_key("t", 7)
    for user in ("", "somebody"):
        service.say(service.run(key, "true", user=user, n=user))
        error = service.wait(key, refusal="NotStartedError", n=user)["error"]
        assert f"the cluster says job_user = {user!r}" in error


def test_a_job_of_a_team_with_another_user_does_not_start(service: Service) -> None:
    key = job_key("t", 7)
    wanted = service.run(key, "true")
    service.say({**wanted, "spec": {**wanted["spec"], "user": "vision"}})
    error = service.wait(key, refusal="NotStartedError")["error"]
    assert "jobs of this team run as user vision, but the agent of here runs them as" in error


def test_a_job_that_takes_its_grace_keeps_no_other_back(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_runner, "AT_ONCE", 1)
    service = Service(opened())
    slow, key = job_key("slow", 7), job_key("t", 8)
    going_on = service.run(slow, "trap '' TERM; while :; do sleep 0.1; done")
    service.say(going_on)
    service.wait(slow, state="running")
    told = {**going_on, "want": "terminate", "grace_s": 600.0}
    service.say(told, service.run(key, "true"))
    service.wait(key, state="finished")
    assert service.state(slow)["state"] == "running"
    ending.stop(str(tmp_path / "jobs"), slow, 0.0)  # which ends the first one, too


def test_walls_that_must_be_there_and_cannot_keep_a_job_from_starting(service: Service) -> None:
    key = job_key("t", 7)
    wanted = service.run(key, "true")
    program = ["-c", "print('bubblewrap is missing')"]
    service.say({**wanted, "spec": {**wanted["spec"], "confine": "must", "walls": program}})
    error = service.wait(key, refusal="NotStartedError")["error"]
    assert "here confines its jobs (confine = must), but" in error


def test_a_second_agent_of_the_folder_is_refused(opened: Open) -> None:
    opened()
    with pytest.raises(OtherAgentError, match=r"another agent runs the jobs in .*: stop it first"):
        opened()


def test_a_folder_that_cannot_be_written_starts_nothing(service: Service, tmp_path: Path) -> None:
    key = job_key("t", 7)
    os.makedirs(tmp_path / "jobs" / key)
    (tmp_path / "jobs" / key / "lock").mkdir()
    service.say(service.run(key, "true"))
    assert "Is a directory" in service.wait(key, want="run")["error"]


def test_no_job_makes_the_report_of_its_server_one_that_is_refused(service: Service, tmp_path: Path) -> None:
    """Its agent would be silent then, and its server closed."""
    key = job_key("t", 7)
    forged = (
        f"touch -d @-5 $GPU_CHECKPOINT_FILE; cd {tmp_path}/jobs; mkdir \"$(printf 'a\\nb')\" \u202e; "
        "printf '\\033]0;x\\n'"
    )
    service.say(service.run(key, forged))
    service.wait(key, state="finished")
    (tmp_path / "jobs" / key / "exit_code").write_text("9" * 200)
    os.utime(tmp_path / "jobs" / key / "exit_code", (-5, -5))
    service.wait(key, exit_code=None)
    told = service.jobs.report()
    report = check_report(json.loads(as_text(reported(1.0, gpu(0), **told))))
    assert [run.key for run in report.runs or ()] == [key]


def test_a_job_that_puts_a_folder_in_place_of_its_output_hides_the_end_of_none(service: Service) -> None:
    spoilt, other = job_key("t", 7), job_key("u", 8)
    log = '"${GPU_JOB_LOCK%/lock}"/log'
    jobs = service.run(spoilt, f"rm {log}; mkdir {log}; exit 5"), service.run(other, "echo last; exit 3")
    service.say(*jobs)
    ended = service.wait(spoilt, state="finished")
    assert (ended["exit_code"], ended["last_line"]) == (5, "")
    assert service.wait(other, state="finished")["last_line"] == "last"


def test_a_full_disk_keeps_a_job_from_starting(small_disk: Path) -> None:
    jobs = AgentJobs("here", str(small_disk / "jobs"), changed=lambda: None, say=print)
    with closing(jobs):
        with suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        service, key = Service(jobs), job_key("t", 7)
        service.say(service.run(key, "true"))
        refused = service.wait(key, refusal="NotStartedError", state="absent")
    assert "No space left on device" in refused["error"]


@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_job_leaves_behind_is_ended_before_its_end_is_told(
    opened: Open, tmp_path: Path, restarted: bool
) -> None:
    """Its lease ends with it, and nobody else would end that: its GPU would be closed, or another's."""
    first, key, go_on = Service(opened()), job_key("t", 7), tmp_path / "go on"
    saves = f"trap 'touch {tmp_path}/saved; exit' TERM; touch {tmp_path}/ready; while :; do sleep 0.02; done"
    without_lock = f"import subprocess; subprocess.Popen(['/bin/sh', '-c', {saves!r}])"
    command = (
        f"{sys.executable} -c {shlex.quote(without_lock)}; while [ ! -e '{go_on}' ]; do sleep 0.02; done"
    )
    first.say(first.run(key, command))
    wait_for((tmp_path / "ready").exists, 10)
    if restarted:
        first.jobs.close()
    go_on.touch()
    if restarted:
        wait_for((tmp_path / "jobs" / key / "exit_code").exists)
    second = Service(opened()) if restarted else first
    assert second.wait(key, state="finished")["exit_code"] == 0
    assert (tmp_path / "saved").exists()


def test_a_job_starts_once_this_machine_has_threads_again(opened: Open) -> None:
    said: list[str] = []
    service, key = Service(opened(say=said.append)), job_key("t", 7)
    threading.stack_size(2**46)  # which no memory has
    try:
        service.say(service.run(key, "exit 3"))
        wait_for(lambda: bool(said))
    finally:
        threading.stack_size(0)
    assert service.wait(key, state="finished")["exit_code"] == 3
    assert {*said} == {"its jobs cannot be seen: can't start new thread"}


def test_more_jobs_than_a_report_may_have_are_told_one_after_the_other(tmp_path: Path, opened: Open) -> None:
    """As after a restart: the tombstones of the jobs whose output is kept go earlier than that."""
    keys = [job_key("t", number + 1) for number in range(MAX_JOBS + 2)]
    for key in keys:
        add_finished(tmp_path / "jobs" / key)
    service, newest = Service(opened()), job_key("u", len(keys) + 1)
    wanted = service.run(newest, "sleep 60")
    service.say(wanted)
    service.wait(newest, state="running", want="run")
    report = check_report(json.loads(as_text(reported(1.0, gpu(0), **service.jobs.report()))))
    assert report.runs is not None
    assert report.runs[0].key == newest
    told = [run.key for run in report.runs[1:4]]
    service.say(wanted, *({"key": key, "want": "forget", "n": ""} for key in told))
    wait_for(lambda: not any(service.state(key).get("ended") is False for key in told))
    service.say(wanted)
    assert len(service.jobs.report()["runs"]) == len(keys) + 1 - len(told)
    service.say({"key": newest, "want": "stop", "n": "1", "grace_s": 0})
    service.wait(newest, state="absent")


def test_last_lines_make_no_report_too_large_and_the_newest_are_told(tmp_path: Path, opened: Open) -> None:
    """As after a restart, when all jobs whose output is kept are told: a refused report is silence."""
    keys = [job_key("t", number + 1) for number in range(800)]
    for number, key in enumerate(keys):
        add_finished(tmp_path / "jobs" / key, "\1" * 1999 + "\n")  # each needs six characters in JSON
        os.utime(tmp_path / "jobs" / key / "exit_code", (1000 + number, 1000 + number))
    report = read_report(as_text(reported(1.0, gpu(0), **opened().report())))
    assert report.runs is not None
    assert [run.key for run in report.runs] == keys[::-1]
    assert (len(report.runs[0].last_line), report.runs[-1].last_line) == (1999, "")


def test_a_job_that_is_preempted_has_its_grace(service: Service) -> None:
    key = job_key("t", 7)
    service.say(service.run(key, SAVES))
    service.wait(key, state="running")
    service.say({"key": key, "want": "preempt", "n": "1", "grace_s": 30, "signal": "TERM"})
    ended = service.wait(key, state="finished")
    assert (ended["exit_code"], ended["last_line"], ended["preempted"]) == (9, "saved", True)


def test_the_grace_of_a_job_ends_also_under_a_new_agent_while_no_service_answers(
    opened: Open, tmp_path: Path
) -> None:
    first, key = Service(opened()), job_key("t", 7)
    first.say(first.run(key, "trap '' TERM; while :; do sleep 0.1; done"))
    first.wait(key, state="running")
    first.say({"key": key, "want": "preempt", "n": "1", "grace_s": 600, "signal": "TERM"})
    first.wait(key, want="preempt", state="running")
    first.jobs.close()
    second = Service(opened())
    assert second.state(key)["state"] == "running"
    os.utime(job_files.told_file_of(str(tmp_path / "jobs"), key), (1000, 1000))
    assert second.wait(key, state="finished")["preempted"]


def test_what_a_killed_job_wrote_stays_for_days_and_longer_if_no_service_knows_of_its_end(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was killed has no exit code to tell when it ended; without a folder it would begin again."""
    monkeypatch.setattr(job_runner, "PRUNE_EVERY_S", 0.0)
    killed, old, unknown = (job_key("t", number) for number in (7, 8, 9))
    root = tmp_path / "jobs"
    for key, ended_at in ((killed, 0), (old, 1000), (unknown, 500)):
        add_finished(root / key, "last words\n")
        os.utime(root / key / "exit_code", (ended_at, ended_at))
    (root / killed / "exit_code").unlink()
    with (root / unknown / "log").open("wb") as log:  # of which all but the end was given back
        log.seek(5 * 2**30)
        log.write(b"last words\n")
    service = Service(opened())
    service.say(*({"key": key, "want": "forget", "n": ""} for key in (killed, old)))
    wait_for(lambda: not (root / old).exists())
    assert service.jobs.output(killed, 0)["text"] == "last words\n"
    assert service.state(unknown)["state"] == "finished"
    for file in (root / killed).iterdir():
        os.utime(file, (1000, 1000))
    wait_for(lambda: not (root / killed).exists())
    assert (root / unknown / "log").exists(), "it takes no room"


def test_a_job_whose_output_takes_too_much_of_the_disk_keeps_its_end_until_a_service_knows_it(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would begin again, or its request wait again as that of a job that did not start."""
    monkeypatch.setattr(job_runner, "PRUNE_EVERY_S", 0.0)
    monkeypatch.setattr(old_outputs, "MAX_LOGS_BYTES", -1)
    key = job_key("t", 7)
    add_finished(tmp_path / "jobs" / key, "last words\n")
    service = Service(opened())
    wait_for(lambda: not (tmp_path / "jobs" / key / "log").exists())
    service.say(service.run(key, "true"))
    ended = service.wait(key, want="run")
    assert (ended["state"], ended["exit_code"], ended["refusal"]) == ("finished", 0, None)


def test_what_an_attach_prepared_and_never_began_goes(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No service tells the agent to forget it, as the name of its folder is that of no lease."""
    monkeypatch.setattr(job_runner, "PRUNE_EVERY_S", 0.0)
    root, key = tmp_path / "jobs", job_key("t", 7)
    old, later, new, runs = (f"attach-0000000{number}" for number in range(4))
    for name in (new, runs, key):
        starting.prepare(str(root), name)
    for name in (runs, key):
        os.utime(root / name / job_files.PREPARED, (1000, 1000))
    with job_files.locked(str(root / runs), fcntl.LOCK_EX, os.O_CREAT):
        service = Service(opened())
        service.say({"key": key, "want": "prepare", "n": "", "spec": {}})
        for each in (old, later):  # the second goes after all of the first look
            starting.prepare(str(root), each)
            os.utime(root / each / job_files.PREPARED, (1000, 1000))
            wait_for(lambda: {old, later}.isdisjoint(os.listdir(root)))
    assert all((root / name).exists() for name in (new, runs, key))


def test_output_that_cannot_be_removed_is_no_room_for_that_of_others(tmp_path: Path) -> None:
    """As where the job put a folder in its place."""
    strange, younger = (job_key("t", number) for number in (7, 8))
    for key in (strange, younger):
        add_finished(tmp_path / key, "x" * 2**20)
    (tmp_path / strange / "log").rename(tmp_path / "output")
    (tmp_path / strange / "log").mkdir()
    (tmp_path / "output").rename(tmp_path / strange / "log" / "output")
    states = {key: {"ended": False, "ended_at": at} for at, key in enumerate((strange, younger))}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(old_outputs, "MAX_LOGS_BYTES", 3 * 2**19)
        old_outputs.remove_old(str(tmp_path), states, print)
    assert not (tmp_path / younger / "log").exists()


def test_what_the_service_orders_once_is_done_once_a_passing_fault_is_over(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the job has used up the descriptors of its server: else it would run on for ever."""
    monkeypatch.setattr(job_runner, "AGAIN_S", 0.0)
    key, tombstones = job_key("t", 7), tmp_path / "jobs" / "ended"
    service.say(service.run(key, "sleep 600"))
    service.wait(key, state="running")
    tombstones.rmdir()
    tombstones.touch()
    service.say({"key": key, "want": "stop", "n": "", "grace_s": 0})
    assert service.wait(key, want="stop", refusal="")["state"] == "running"
    tombstones.unlink()
    service.wait(key, state="absent", error=None)


def test_the_folder_of_a_job_that_never_began_goes_once_its_end_is_known(
    service: Service, tmp_path: Path
) -> None:
    key = job_key("t", 7)
    wanted = service.run(key, "true")
    walls = {"confine": "must", "walls": ["-c", "print('bubblewrap is missing')"]}
    service.say({**wanted, "spec": {**wanted["spec"], **walls}})
    service.wait(key, refusal="NotStartedError")
    assert (tmp_path / "jobs" / key).exists()
    service.say({"key": key, "want": "forget", "n": ""})
    service.wait(key, want="forget", ended=True)
    assert not (tmp_path / "jobs" / key).exists()


def test_of_a_long_output_the_newest_part_is_kept_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, size = str(tmp_path / "jobs"), 4 * 2**20
    monkeypatch.setattr(long_logs, "KEPT_BYTES", size)
    monkeypatch.setattr(job_runner, "CUT_EVERY_S", 0.1)
    jobs = AgentJobs("here", root, changed=lambda: None, say=print)
    try:
        service, key = Service(jobs), job_key("t", 7)
        service.say(service.run(key, "yes 0123456 | head -c 16777216; echo the end; sleep 60"))
        wait_for(lambda: jobs.output(key, -8)["text"] == "the end\n")
        wait_for(lambda: os.stat(tmp_path / "jobs" / key / "log").st_blocks * 512 <= size)
        found = jobs.output(key, 0)
        said = r"gpu-manager: the first ([\d,]+) bytes of this output are not kept any more\n0123456\n"
        first = re.match(said, found["text"])
        assert first is not None
        assert 12 * 2**20 <= int(first[1].replace(",", "")) < 14 * 2**20
        later = jobs.output(key, found["offset"])
        assert later["text"].startswith("0123456\n"), "what is kept has its place, and nothing is said again"
        service.say({"key": key, "want": "stop", "n": "", "grace_s": 0})
        service.wait(key, state="absent")
    finally:
        jobs.close()


def test_output_is_read_by_parts_and_from_the_end(service: Service) -> None:
    key = job_key("t", 7)
    service.say(service.run(key, "echo one; echo two"))
    service.wait(key, state="finished")
    assert service.jobs.output(key, 4)["text"] == "two\n"
    assert service.jobs.output(key, -6)["text"] == "e\ntwo\n"


def lacking_memory(*_: object, **__: object) -> None:
    raise MemoryError


def test_a_job_is_seen_and_starts_once_there_is_memory_again(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    service, key = Service(opened(say=said.append)), job_key("t", 7)
    with monkeypatch.context() as patched:
        patched.setattr(job_states, "status", lacking_memory)
        service.say(service.run(key, "exit 3"))
        wait_for(lambda: said == ["its jobs cannot be seen: MemoryError"])
    assert service.wait(key, state="finished")["exit_code"] == 3


def test_a_start_for_which_there_is_no_memory_is_told_and_tried_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_runner, "AGAIN_S", 0.0)
    key = job_key("t", 7)
    with monkeypatch.context() as patched:
        patched.setattr(starting, "prepare", lacking_memory)
        service.say(service.run(key, "exit 3"))
        service.wait(key, error="MemoryError")
    assert service.wait(key, state="finished")["exit_code"] == 3


def test_a_fault_that_lasts_is_told_once(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """It filled the log with a line a second."""
    said: list[str] = []
    faults, is_over = iter(["away", "away", "full", "full", "", "full"]), threading.Event()

    def fail(_: AgentJobs) -> None:
        if (fault := next(faults, None)) is None:
            is_over.set()
        elif fault:
            raise OSError(fault)

    monkeypatch.setattr(job_runner, "TICK_S", 0.0)
    monkeypatch.setattr(AgentJobs, "_converge", fail)
    opened(say=said.append)
    assert is_over.wait(10)
    assert said == [f"its jobs cannot be seen: {fault}" for fault in ("away", "full", "full")]
