"""`python -m tests.fuzz.run [NAME …]`: every parser under atheris, which `make fuzz` installs.

Each runs in a process of its own for `--seconds`; a defect ends with its input in artifacts/fuzz.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import click

ARTIFACTS = Path(__file__).parent.parent.parent / "artifacts" / "fuzz"
SLOWEST_S = 10
MEMORY_MIB = 3072


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--seconds", type=click.IntRange(min=1), default=60, show_default=True)
@click.option("--harness", hidden=True, help="The one parser that this process feeds.")
@click.option("--corpus", hidden=True)
def main(names: tuple[str, ...], seconds: int, harness: str | None, corpus: str | None) -> None:
    if harness is not None:
        feed(harness, str(corpus), seconds)
        return
    if find_spec("atheris") is None:
        sys.exit("atheris is not on the Python path: run `make fuzz`, which installs it into .venv-fuzz")
    from tests.fuzz.parsers import parsers

    unknown = set(names) - set(parsers())
    if unknown:
        sys.exit(f"unknown parser {', '.join(sorted(unknown))}; known are {', '.join(sorted(parsers()))}")
    failed = [name for name in names or sorted(parsers()) if not run(name, seconds)]
    if failed:
        sys.exit(f"defects in {', '.join(failed)}; their inputs are in {ARTIFACTS}")


def run(name: str, seconds: int) -> bool:
    """Return True if the parser accepted the input or refused it properly."""
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as corpus:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.fuzz.run", "--harness", name),
                *("--corpus", corpus, "--seconds", str(seconds)),
            ],
            capture_output=True,
            text=True,
            errors="replace",
        )
    last = [line for line in done.stderr.splitlines() if line.startswith("#") or "Done" in line][-1:]
    print(f"{name}: {'stood it' if done.returncode == 0 else 'DEFECT'}; {' '.join(last)[:100]}", flush=True)
    if done.returncode:
        print(done.stdout[-1500:], done.stderr[-1500:], file=sys.stderr)
    return done.returncode == 0


def feed(name: str, corpus: str, seconds: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["resource_manager", "simulator", "tests.fuzz"]):
        from tests.fuzz.parser import check
        from tests.fuzz.parsers import parsers
    parser = parsers()[name]
    for number, example in enumerate(parser.examples):
        (Path(corpus) / str(number)).write_bytes(example)
    work = tempfile.mkdtemp()

    def one(data: bytes) -> None:
        folder = Path(work) / "x"
        folder.mkdir()
        try:
            check(parser, data, folder)
        finally:
            shutil.rmtree(folder)

    options = [f"-max_total_time={seconds}", f"-timeout={SLOWEST_S}", f"-rss_limit_mb={MEMORY_MIB}"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={ARTIFACTS}/{name}-", corpus], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
