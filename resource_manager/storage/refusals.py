"""The refusals of a server that keeps the state, in the words that Redis and databases share.

`where` names the server, `version` is the one that the refused commit was decided on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from resource_manager import errors
from resource_manager.storage.clock import CLOCK_TOLERANCE_S

ANOTHER_STATE = "another state"
CHECK_AND_RESET = "check which jobs still run and start over with a reset"
START_AGAIN = "start this process again where the other state is the right one"


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Add the place of the data and the remedy to the errors of those who read it inside."""
    try:
        yield
    except errors.NewerFormatError as error:
        raise errors.NewerFormatError(f"{where}: {error}") from error
    except errors.CorruptStateError as error:
        if where in str(error):  # of the store itself
            raise
        advice = "restore its data, or start over with a reset"
        raise errors.CorruptStateError(f"{where}: {error}; {advice}") from error


def no_state(where: str, version: int) -> errors.StaleStateError:
    """Return the error for a commit to a store that never had a state."""
    return errors.StaleStateError(version, None, f"{where} holds no state; write the first one")


def off_the_clock(version: int, stored: int) -> errors.StaleStateError:
    """Return the error for a decision made at another time than the store's."""
    return errors.StaleStateError(
        version, stored, f"decided more than {CLOCK_TOLERANCE_S:g} s off the store's clock; retry"
    )


def recovery_text(began_ago_s: float, resumes_in_s: float, clock_jump_s: float) -> str:
    """Say why grants pause: a restart of the store, or a jump of its clock by `clock_jump_s`."""
    what = "the store restarted or was restored"
    if clock_jump_s:
        way = "forward" if clock_jump_s > 0 else "back"
        what = f"the store's clock jumped {way} by {abs(clock_jump_s):.0f} s, seen"
    return (
        f"{what} {began_ago_s:.0f} s ago; grants resume in {resumes_in_s:.0f} s "
        "(until then the owners of leases renew them)"
    )


def unconfirmed(window_s: float, left_s: float, clock_jump_s: float) -> errors.StateUnconfirmedError:
    """Return the error for a grant in a recovery window of `window_s` seconds, of which `left_s` are left.

    A jump of the store's clock by `clock_jump_s` began it, or where that is 0 a restart.
    """
    text = recovery_text(max(window_s - left_s, 0.0), left_s, clock_jump_s)
    return errors.StateUnconfirmedError(text, remaining_s=left_s, clock_jump_s=clock_jump_s)


def torn(where: str, version: int) -> errors.StateLostError:
    """Return the error for a state of which leases are gone without a change that ended them."""
    return errors.StateLostError(
        f"{where} has lost leases of its state (version {version}); restore its data, or {CHECK_AND_RESET}"
    )


def lost(where: str, version: int, present: object) -> errors.StateLostError:
    """Return the error for a state that is gone, another, or older than the version read from it before."""
    kind, remedy = errors.StateLostError, CHECK_AND_RESET
    if present == ANOTHER_STATE:  # a reset would end the leases of those who go on with it
        kind, remedy = errors.StateReplacedError, START_AGAIN
    return kind(
        f"{where} has lost the state that was read from it before (version {version}; now: {present}); "
        f"restore its data, or {remedy}"
    )
