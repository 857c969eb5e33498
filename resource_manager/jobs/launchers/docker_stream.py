"""What a Docker engine sends bit by bit: records of a log, ends of containers, the progress of a pull."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from resource_manager.jobs.launchers.base import LauncherError
from resource_manager.jobs.launchers.docker_engine import TIMEOUT_S

SILENT_S = 60.0
"""Time without the end of a container after which the engine is asked for ends anew."""

LOG_CHUNK_BYTES = 4 * 1024 * 1024
"""Most bytes of a log read at once; large, since the engine searches every position from the start."""

HOLD_S = 10.0
"""Longest time for which a line that has not ended, as a progress bar, keeps the other stream's back."""


def log_chunk(
    api: Any, key: str, offset: int, *, is_over: bool, clock: Callable[[], int] = time.time_ns
) -> tuple[str, int, bool]:
    """Return whole lines of what was logged after `offset`, the offset after them, and if they are all.

    All parts of a line have the time at which it began. So nothing is told that was printed after the begin
    of one that has not ended, whose rest would be before the offset then. Of a line longer than
    `LOG_CHUNK_BYTES` only the beginning is told, and of one that has not ended after `HOLD_S` while the other
    stream prints; the last ones of a job that is over are told as they are.
    """
    lines: list[tuple[int, bytes]] = []
    begun: dict[int, tuple[int, bytearray]] = {}
    size = 0
    for at, stream, part in log_records(api, key, offset):
        line = begun.setdefault(stream, (at, bytearray()))[1]
        line += part
        size += len(part)
        if part.endswith(b"\n"):
            lines.append((at, bytes(line)))
            del begun[stream]
        if size >= LOG_CHUNK_BYTES:
            break
    is_all = size < LOG_CHUNK_BYTES
    first_begun = min((at for at, _ in begun.values()), default=0)
    told = [(at, line) for at, line in lines if not begun or at < first_begun]
    left = len(lines) + len(begun) - len(told)
    is_late = bool(lines) and clock() - first_begun > HOLD_S * 10**9
    if not told and (is_over or not is_all or is_late):
        told, left = lines, 0
    else:
        begun = {}
    whole = b"".join(line for _, line in sorted(told, key=itemgetter(0)))
    whole += b"\n".join(line for _, line in begun.values())
    following = max((at for at, _ in (*told, *begun.values())), default=offset)
    return whole.decode("utf-8", "replace"), following, is_all and not (left and is_over)


def log_records(api: Any, key: str, offset: int, tail: str = "all") -> Iterator[tuple[int, int, bytes]]:
    """Yield time, stream and text of each record logged after `offset`: a line, or a part of 16 KiB.

    The SDK's `logs` is not used, since it holds the whole log in memory or waits for its end.
    """
    since = f"{offset // 10**9}.{offset % 10**9:09}"
    wanted = {"stdout": 1, "stderr": 1, "timestamps": 1, "since": since, "tail": tail}
    with _streamed(api, f"containers/{key}/logs", wanted, TIMEOUT_S) as response:
        data = b""
        for piece in response.iter_content(16 * 1024):
            data += piece
            while len(data) >= 8 and len(data) >= (end := 8 + int.from_bytes(data[4:8], "big")):
                stream = data[0]
                stamp, _, text = data[8:end].partition(b" ")
                data = data[end:]
                at = nanoseconds(stamp.decode())
                if at > offset:
                    yield at, stream, text


def ended_containers(api: Any) -> Iterator[str]:
    """Yield an empty text once it is connected, then names of containers that end.

    It is over when none has ended for `SILENT_S`: a connection may be cut without a sign.
    """
    import requests

    wanted = {"filters": json.dumps({"type": ["container"], "event": ["die"]})}
    with _streamed(api, "events", wanted, SILENT_S) as response:
        yield ""
        try:
            for line in response.iter_lines():
                yield json.loads(line)["Actor"]["Attributes"]["name"]
        except requests.ConnectionError:  # so a read says that its time is over
            return
        raise OSError("its events came to an end")


@contextmanager
def _streamed(api: Any, path: str, wanted: Mapping[str, Any], silent_s: float) -> Iterator[Any]:
    """Yield the response to a GET, to be read as it comes; `silent_s` is the longest time without any."""
    import requests
    from docker.errors import create_api_error_from_http_exception

    url = f"{api.base_url}/v{api.api_version}/{path}"
    with api.get(url, params=wanted, timeout=(TIMEOUT_S, silent_s), stream=True) as response:
        try:
            response.raise_for_status()
        except requests.HTTPError as error:
            create_api_error_from_http_exception(error)
        yield response


def nanoseconds(stamp: str) -> int:
    """Return an RFC 3339 time of the engine, with up to nine decimals, in nanoseconds since the epoch."""
    seconds, _, fraction = stamp.rstrip("Z").partition(".")
    whole = int(datetime.fromisoformat(seconds).replace(tzinfo=UTC).timestamp())
    return whole * 10**9 + int(fraction.ljust(9, "0")[:9] or 0)


def pull(api: Any, engine: str, image: str) -> None:
    """Pull an image to the engine of that address; raises `LauncherError`."""
    from docker.errors import APIError

    missing = f"image {image!r} is not on {engine} and"
    try:
        with closing(api.pull(image, stream=True, decode=True)) as lines:
            for line in lines:
                if "error" in line:
                    raise LauncherError(f"{missing} {line['error']}")
    except APIError as error:
        raise LauncherError(f"{missing} cannot be pulled: {error.explanation}") from error
