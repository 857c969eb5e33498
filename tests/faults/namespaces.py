"""Network namespaces, each joined to this one by a veth pair, to be cut off, delayed and made lossy."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from functools import cache

_numbers = itertools.count()


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)


def _must(*words: str) -> None:
    done = _run(*words)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


@cache
def what_is_missing() -> str:
    """Why there can be no namespaces here; empty if there can."""
    try:
        Namespace().close()
    except (RuntimeError, OSError) as error:
        return f"needs the right to make network namespaces and iproute2: {error}"
    if not has_netem() and shutil.which("iptables") is None:
        return "needs iptables (Debian: iptables) where the kernel has no netem"
    return ""


@cache
def has_netem() -> bool:
    """Return True if the kernel can delay and drop; without it, iptables drops and nothing is delayed."""
    zone = Namespace()
    try:
        return zone.shape("delay", "1ms")
    finally:
        zone.close()


class Namespace:
    """One namespace: `address` is this side's, which is where its processes find the server."""

    def __init__(self) -> None:
        number = next(_numbers)
        self.name = f"faults-{os.getpid()}-{number}"
        self._link = f"fz{os.getpid() % 100_000}-{number % 10_000}"
        self._lossy = 0.0
        net = f"10.{200 + os.getpid() % 50}.{number % 250}"
        self.address = f"{net}.1"
        inside = ("ip", "netns", "exec", self.name)
        try:
            _must("ip", "netns", "add", self.name)
            peer = f"{self._link}p"
            _must("ip", "link", "add", self._link, "type", "veth", "peer", "name", peer)
            _must("ip", "link", "set", peer, "netns", self.name)
            _must("ip", "addr", "add", f"{self.address}/24", "dev", self._link)
            _must("ip", "link", "set", self._link, "up")
            _must(*inside, "ip", "addr", "add", f"{net}.2/24", "dev", peer)
            _must(*inside, "ip", "link", "set", peer, "up")
            _must(*inside, "ip", "link", "set", "lo", "up")
        except RuntimeError:
            self.close()
            raise

    def cut(self) -> None:
        """Packets of both directions vanish; connections stay."""
        _must("ip", "link", "set", self._link, "down")

    def join(self) -> None:
        _must("ip", "link", "set", self._link, "up")

    def shape(self, *netem: str) -> bool:
        """Delay, loss, duplication and reordering on the way to the namespace; False without netem."""
        return _run("tc", "qdisc", "replace", "dev", self._link, "root", "netem", *netem).returncode == 0

    def lose(self, probability: float) -> None:
        """Drops that share of the packets that come from the namespace."""
        self._lossy = probability
        _must("iptables", "-I", "INPUT", *self._rule())

    def heal(self) -> None:
        _run("tc", "qdisc", "del", "dev", self._link, "root")
        if self._lossy:
            _must("iptables", "-D", "INPUT", *self._rule())
            self._lossy = 0.0

    def close(self) -> None:
        self.heal()
        _run("ip", "link", "del", self._link)
        _run("ip", "netns", "del", self.name)

    def _rule(self) -> tuple[str, ...]:
        chance = ("-m", "statistic", "--mode", "random", "--probability", str(self._lossy))
        return ("-i", self._link, *chance, "-j", "DROP")
