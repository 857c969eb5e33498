"""Program that stays on a server, runs programs there, each in a process of its own, and looks at jobs.

Standard library only, since it is sent along. Standard input has lines of JSON: {"id": number, "program":
text} runs a program, {"id", "root": folder, "watch": key} has a `Lookout` of that folder watch a job, {"id",
"forget": key} no more, and {"id"} alone ends the lookout; the end of the input ends this. Standard output
gets {"id"} when a program begins, {"id", "code", "output", "complaint"} when it has ended, {"id", "changed":
keys} or, at its end, {"id", "failed": reason} from a lookout, and {} now and then. Programs that run when
this ends go on.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
import time
import traceback
from typing import Any

CHUNK_BYTES = 256 * 1024
HEARTBEAT_S = 10.0
TICK_S = 0.1


class Run:
    """Program in a process of its own, which knows these names; raises `OSError` if there is none."""

    def __init__(self, number: int, program: str, names: dict[str, Any]) -> None:
        self.number = number
        output, complaint = os.pipe(), os.pipe()
        self.texts = {output[0]: b"", complaint[0]: b""}
        try:
            self.process = os.fork()
            if self.process == 0:
                _execute(program, names, output[1], complaint[1])
        except OSError:
            self._close(*self.texts)
            raise
        finally:
            self._close(output[1], complaint[1])

    def read(self, pipe: int) -> bool:
        """Read from one of the pipes; return False if it has come to its end."""
        data = os.read(pipe, CHUNK_BYTES)
        self.texts[pipe] += data
        return bool(data)

    def ended(self) -> dict[str, Any]:
        """Wait for the end; return what is said of it."""
        status = os.waitpid(self.process, 0)[1]
        output, complaint = (text.decode("utf-8", "replace") for text in self.texts.values())
        code = os.WEXITSTATUS(status)
        if os.WIFSIGNALED(status):
            code = -os.WTERMSIG(status)
            complaint += f"\nits process was ended by signal {-code}"
        return {"id": self.number, "code": code, "output": output, "complaint": complaint}

    @staticmethod
    def _close(*descriptors: int) -> None:
        for descriptor in descriptors:
            os.close(descriptor)


def _execute(program: str, names: dict[str, Any], output: int, complaint: int) -> None:
    """Run the program in this process, with its standard streams, and end."""
    code = 1
    try:
        for descriptor, stream in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (complaint, 2)):
            os.dup2(descriptor, stream)
        exec(compile(program, "<program>", "exec"), names)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def serve(names: dict[str, Any]) -> None:
    """Do what standard input says until its end; the programs know these names, one of them `Lookout`."""
    runs: dict[int, Run] = {}
    lookouts: dict[int, Any] = {}
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    begun, looked_at, told_at = b"", 0.0, 0.0

    def say(**message: Any) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()  # a process that is forked would have it, too

    def run(number: int, program: str) -> None:
        say(id=number)
        try:
            started = Run(number, program, names)
        except OSError as error:
            say(id=number, code=1, output="", complaint=f"OSError: {error}")
            return
        for pipe in started.texts:
            runs[pipe] = started
            selector.register(pipe, selectors.EVENT_READ)

    def read(pipe: int) -> None:
        if runs[pipe].read(pipe):
            return
        selector.unregister(pipe)  # before it is closed: other processes have copies of it
        os.close(pipe)
        ended = runs.pop(pipe)
        if ended not in runs.values():
            say(**ended.ended())

    def obey(message: dict[str, Any]) -> None:
        number = message["id"]
        if "program" in message:
            run(number, message["program"])
        elif "watch" in message:
            lookouts.setdefault(number, names["Lookout"](message["root"])).watch(message["watch"])
        elif "forget" not in message:
            lookouts.pop(number, None)
        elif number in lookouts:
            lookouts[number].forget(message["forget"])

    def report_change(number: int) -> None:
        try:
            changed = lookouts[number].changed()
        except OSError as error:
            del lookouts[number]
            say(id=number, failed=str(error))
            return
        if changed:
            say(id=number, changed=changed)

    while True:
        for ready, _ in selector.select(TICK_S if lookouts else HEARTBEAT_S):
            if ready.fd != 0:
                read(ready.fd)
                continue
            data = os.read(0, CHUNK_BYTES)
            if not data:
                return
            *lines, begun = (begun + data).split(b"\n")
            for line in lines:
                obey(json.loads(line.decode()))
        now = time.monotonic()
        if now - looked_at >= TICK_S:
            for number in list(lookouts):
                report_change(number)
            looked_at = now
        if now - told_at >= HEARTBEAT_S:
            say()
            told_at = now
