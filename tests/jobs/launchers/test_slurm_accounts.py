"""Jobs on a real Slurm with accounts, which slurmdbd keeps in a real MariaDB."""

from typing import Any

import pytest

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import (
    JobState,
    JobStatus,
    LauncherError,
    LauncherUnreachableError,
    open_at,
)
from tests.eventually import wait_for, wait_until_ended
from tests.jobs.launchers.test_slurm import said, shell
from tests.slurm_cluster import slurm_with_accounts

__all__ = ["slurm_with_accounts"]

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def accounts(slurm_with_accounts):
    """Account `ai` of root; its QOS `small` has one GPU a user and 10 minutes a job, `other` is nobody's."""
    for command in (
        "add account ai",
        "add user root account=ai",
        "add qos small maxwall=10 maxtresperuser=gres/gpu=1",
        "add qos other",
        "modify user root set qos+=small",
    ):
        slurm_with_accounts.ask(f"sacctmgr --immediate {command}")
    return slurm_with_accounts


@pytest.fixture
def launcher(accounts, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", accounts.environment["SLURM_CONF"])
    launcher: Any = open_at(JobPlace("slurm"))
    launcher.root = str(tmp_path)
    return launcher


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"account": "nope"}, "Invalid account or account/partition combination specified"),
        ({"account": "ai", "qos": "nope"}, "Invalid qos specification"),
        ({"account": "ai", "qos": "other"}, "Invalid qos specification"),
    ],
)
def test_an_account_or_qos_that_is_not_the_users_is_told_in_slurms_words(launcher, key, options, reason):
    with pytest.raises(LauncherError, match=rf"job {key} could not be started on \S+: {reason}$") as failed:
        launcher.start(shell(key, "true", options=options))
    assert not isinstance(failed.value, LauncherUnreachableError)
    assert launcher.status(key) == JobStatus(JobState.ABSENT)


def test_a_time_above_the_limit_of_the_qos_never_runs(launcher, key):
    launcher.start(shell(key, "true", time_s=3600, options={"account": "ai", "qos": "small"}))
    wait_for(lambda: said(launcher, key).never)
    assert said(launcher, key).wait == (
        "its time is above the limit of the QOS (QOSMaxWallDurationPerJobLimit)"
    )


def test_more_gpus_than_the_qos_allows_a_user_wait_until_others_end(launcher, key, accounts):
    options = {"account": "ai", "qos": "small"}
    holds = accounts.ask("sbatch --parsable -A ai -q small --gpus-per-node=1 -o /dev/null --wrap 'sleep 60'")
    launcher.start(shell(key, "echo $SLURM_JOB_ACCOUNT $SLURM_JOB_QOS", gpus=1, time_s=60, options=options))
    wait_for(lambda: said(launcher, key).reason == "QOSMaxGRESPerUser")
    assert (said(launcher, key).never, said(launcher, key).wait) == (
        False,
        "its user has all GPUs that the QOS allows a user (QOSMaxGRESPerUser)",
    )
    accounts.ask(f"scancel {holds}")
    assert wait_until_ended(launcher, key, 60.0).exit_code == 0
    assert launcher.logs(key).text == "ai small\n"


def test_an_end_that_the_controller_has_forgotten_is_in_the_accounts(launcher, key, accounts):
    launcher.start(shell(key, "sleep 60", options={"account": "ai"}))
    wait_for(lambda: said(launcher, key).where)
    job = said(launcher, key).id
    accounts.ask(f"scancel {job}")
    known = f"scontrol show job {job}"
    wait_for(lambda: "JobId=" not in accounts.ask(known, check=False), 90.0)
    assert launcher.status(key).state is JobState.FINISHED
    assert said(launcher, key).end == "the job was cancelled on Slurm"


def test_jobs_begin_and_end_while_the_accounts_are_away(launcher, key, accounts):
    accounts.kill("slurmdbd")
    try:
        launcher.start(shell(key, "sleep 2; exit 3", options={"account": "ai"}))
        job = said(launcher, key).id
        assert wait_until_ended(launcher, key, 60.0).exit_code == 3
        known = f"scontrol show job {job}"
        wait_for(lambda: "JobId=" not in accounts.ask(known, check=False), 90.0)
        assert launcher.status(key) == JobStatus(JobState.FINISHED, 3)
    finally:
        accounts.start_database()
