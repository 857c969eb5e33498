"""Parts of both command lines: errors in one line, exit codes, and JSON on standard output."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

DONE, REFUSED, BAD_INPUT, UNREACHABLE = 0, 1, 2, 3
"""Exit codes of every command."""

INTERRUPTED = 130
"""Exit code of one that Ctrl-C ends, as of every program that a shell starts."""

DAY_S = 86_400

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
"""Values of options that name a file or a folder, which need not exist."""


class Failure(click.ClickException):
    """Error that prints one line on standard error and sets an exit code; `advice` is a second line."""

    def __init__(self, message: str, exit_code: int, advice: str = "") -> None:
        super().__init__("\n".join(one_line(line) for line in (message, advice) if line))
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it on the class


class Command(click.Command):
    """Command that refuses a second value of an option that has one, where click would drop the first."""

    def make_parser(self, ctx: click.Context) -> Any:
        parser: Any = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            options, rest, order = parse(args)
            for param, count in Counter(order).items():
                has_one = isinstance(param, click.Option) and not (param.multiple or param.is_flag)
                if has_one and count > 1:
                    raise click.UsageError(f"{param.opts[0]} is given {count} times and has one value", ctx)
            return options, rest, order

        parser.parse_args = parse_args
        return parser


class OneLineErrors(click.Group):
    """Group that prints an error of the input in one line, where click would also print the usage."""

    command_class = Command
    group_class = type
    """Makes nested groups of this class too."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        run: Callable[..., Any] = super().main
        if not standalone_mode:
            return run(*args, standalone_mode=False, **extra)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal without the characters of a table shows "?"
        code: Any = DONE
        fault: OSError | None = None
        try:
            code = run(*args, standalone_mode=False, **extra)
        except click.UsageError as error:
            text = one_line(error.format_message())
            end = "" if text.endswith((".", "?")) else "."
            advice = f"{end} See {error.ctx.command_path} --help." if error.ctx else ""
            click.echo(f"Error: {text}{advice}", err=True)
            code = error.exit_code
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except click.Abort as error:
            click.echo("Error: aborted.", err=True)
            code = INTERRUPTED if isinstance(error.__cause__, KeyboardInterrupt) else REFUSED
        except OSError as error:  # not of a file, which a command would name
            fault = error
        unwritten = _output_fault()
        if fault := unwritten or fault:
            place = "standard output" if unwritten or fault.errno == errno.ENOSPC else fault.filename
            click.echo(f"Error: {of_file(fault, place)}", err=True)
            code = code or BAD_INPUT
        sys.exit(code if isinstance(code, int) else DONE)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; without any, print the help to standard error and exit with 2."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(BAD_INPUT)
        return super().parse_args(ctx, args)


def _output_fault() -> OSError | None:
    """Return why standard output does not take what it was given, which is then dropped; None if it does."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again at its end
        return error
    return None


def of_file(error: OSError, name: str | None = None) -> str:
    """Return the file, or what `name` says instead, and what is wrong with it, without the error's number."""
    place = name or error.filename
    return one_line(f"{place}: {error.strerror}" if place and error.strerror else error)


def confirm(question: str) -> None:
    """Ask on the terminal, and abort without a yes; raises `Failure` where nobody is there to answer."""
    try:
        click.confirm(question, abort=True, err=True)
    except (click.Abort, RuntimeError):  # RuntimeError: standard input is closed
        if is_terminal(sys.stdin):
            raise
        click.echo(err=True)
        advice = "add --yes where nobody can answer"
        raise Failure(f"not confirmed, nothing was changed: {advice}", REFUSED) from None


def is_terminal(stream: Any) -> bool:
    """Return whether a standard stream is a terminal; a closed one is None."""
    return stream is not None and bool(stream.isatty())


def one_line(text: object) -> str:
    """Return the text as one line that cannot steer a terminal: a server or a service may have written it."""
    from resource_manager.agent.probe import printable  # no command but a failing one needs it

    return printable(" ".join(str(text).split()))


UNPRINTED = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that JSON may hold as they are, and that steer a terminal, turn its text or have no bytes."""


def print_json(value: object) -> None:
    """Print one line of JSON on standard output, which steers no terminal."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    click.echo(UNPRINTED.sub(lambda found: json.dumps(found[0])[1:-1], text))


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """Seconds, or a number with a unit: 90, 30min, 2h, 1d."""

    name = "duration"

    def __init__(self, most_s: float = 366 * DAY_S, in_words: str = "a year") -> None:
        self._most_s, self._in_words = most_s, in_words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from resource_manager.manager.cluster_file.durations import seconds_of  # loads pydantic

        try:
            seconds = seconds_of(str(value))
        except ValueError as error:
            self.fail(f"a duration {error}", param, ctx)
        if not 0 < seconds <= self._most_s:
            self.fail(f"a duration must be above 0 and at most {self._in_words}, got {value!r}", param, ctx)
        return seconds


class FiniteRange(click.FloatRange):
    """Range of finite numbers; `FloatRange` accepts nan in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


INTERVAL = Duration(DAY_S, "a day")
"""Time between two of what a command repeats."""


STEERING = re.compile(r"\x1b(?!\[[0-9;:]*[mK])|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
"""Characters that would steer the terminal of a reader: all controls but colours, line ends and returns."""


def harmless(text: str) -> str:
    """Return a job's output, escaped where it would steer the terminal: its title, clipboard or answers."""
    return STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


FORMULA = re.compile("(^|;)(?=[-=+@\t\r\uff0b\uff0d\uff1d\uff20])")
"""Beginning of a text that spreadsheets compute; some take a semicolon for the end of a cell."""


def inert(text: str) -> str:
    """Return a name as a spreadsheet shows it, not as a formula that it would compute."""
    return FORMULA.sub(r"\1'", text)
