"""Servers of a gang: network namespaces on one bridge, with an sshd in each, to be cut off one by one."""

import os
import subprocess
from typing import Any

from tests.e2e.servers import SSHServer

INTERFACE = "gang0"
"""Network interface of every server, at its address."""


def must(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


class GangServer(SSHServer):
    """One server: a namespace with an address of its own, and a home folder for its jobs."""

    def __init__(self, home, bridge, number, net):
        self.name = f"gang-{number}"
        self.namespace = f"gang-{os.getpid()}-{number}"
        self.link = f"gl{os.getpid() % 100_000}-{number}"
        must("ip", "netns", "add", self.namespace)
        peer = f"{self.link}p"
        must("ip", "link", "add", self.link, "type", "veth", "peer", "name", peer)
        must("ip", "link", "set", self.link, "master", bridge, "up")
        must("ip", "link", "set", peer, "netns", self.namespace, "name", INTERFACE)
        address = f"{net}.{number + 11}"
        for words in (
            ("ip", "addr", "add", f"{address}/24", "dev", INTERFACE),
            ("ip", "link", "set", INTERFACE, "up"),
            ("ip", "link", "set", "lo", "up"),
        ):
            must(*self.inside, *words)
        home.mkdir()
        super().__init__(home, address, {"HOME": str(home), "GANG_SERVER": self.name}, port=22)
        self.prefix = self.inside

    @property
    def inside(self):
        """Words before a command that is to run in the namespace."""
        return ("ip", "netns", "exec", self.namespace)

    def cut(self):
        """Let packets of both directions vanish; processes and connections stay."""
        must("ip", "link", "set", self.link, "down")

    def join(self):
        must("ip", "link", "set", self.link, "up")

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.stop()
        for pid in subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True
        ).stdout.split():
            os.kill(int(pid), 9)
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True)
        subprocess.run(["ip", "link", "del", self.link], capture_output=True)


class GangServers:
    """Several servers that reach each other and this machine; one key opens all."""

    make = GangServer
    servers: list[Any]

    def __init__(self, home, count=4):
        self.home = home
        self.net = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self.bridge = f"gb{os.getpid() % 1_000_000}"
        must("ip", "link", "add", self.bridge, "type", "bridge")
        self.servers = []
        # An engine of containers drops what bridges forward.
        self.rule = ("FORWARD", "-i", self.bridge, "-o", self.bridge, "-j", "ACCEPT")
        subprocess.run(["iptables", "-I", *self.rule], capture_output=True)
        try:
            must("ip", "addr", "add", f"{self.net}.1/24", "dev", self.bridge)
            must("ip", "link", "set", self.bridge, "up")
            for number in range(count):
                server = self.make(home / f"server-{number}", self.bridge, number, self.net)
                self.servers.append(server)
                if number:  # all accept the first one's key
                    server.share_key(self.servers[0])
                server.start()
        except BaseException:
            self.close()
            raise

    @property
    def connection(self):
        return self.servers[0].connection

    @property
    def key(self):
        return self.servers[0].key

    def close(self):
        for server in self.servers:
            server.close()
        subprocess.run(["iptables", "-D", *self.rule], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)
