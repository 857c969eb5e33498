"""A proxy before a Redis that delays, holds back, repeats, cuts connections and loses answers on demand."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time


class Proxy:
    """Forwards a local TCP port to a unix socket; every attribute may be changed while it runs.

    `delay_s` is added to each piece of data; while `partitioned` nothing passes and nothing is refused;
    `lose_answers` counts the answers still to be lost, each with its connection, and `repeat` the scripts
    still to be sent a second time, up to half a second later and so behind others, by nobody who listens;
    `connections` is the number of those that it took.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.delay_s = 0.0
        self.lose_answers = 0
        self.repeat = 0
        self.partitioned = False
        self.connections = 0
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._guard = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def url(self, namespace: str) -> str:
        return f"redis://127.0.0.1:{self.port}/0?namespace={namespace}"

    def cut(self) -> None:
        """Ends every connection there is."""
        with self._guard:
            for pair in self._pairs:
                _hang_up(*pair)

    def close(self) -> None:
        """Ends all; a thread left in `accept` could take the connections of a later proxy's listener."""
        _hang_up(self._listener)
        self._accepting.join()
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        """Serves one connection until one of its ends closes."""
        with client, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            try:
                server.connect(self.target)
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._guard:
                self._pairs.add((client, server))
            answers = threading.Thread(target=self._pump, args=(server, client, True), daemon=True)
            answers.start()
            self._pump(client, server, False)
            answers.join()
            with self._guard:
                self._pairs.discard((client, server))

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.delay_s:
                    time.sleep(self.delay_s)
                while self.partitioned:
                    time.sleep(0.01)
                if answers:
                    with self._guard:
                        lose, self.lose_answers = self.lose_answers > 0, max(self.lose_answers - 1, 0)
                    if lose:
                        break
                elif b"EVALSHA" in data and self.repeat > 0:
                    self.repeat -= 1
                    threading.Timer(0.5 * random.random(), self._send_again, (data,)).start()
                sink.sendall(data)
        _hang_up(source, sink)

    def _send_again(self, data: bytes) -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as late:
            late.settimeout(1.0)
            late.connect(self.target)
            late.sendall(data)
            late.recv(65536)


def _hang_up(*ends: socket.socket) -> None:
    """Wake the threads that wait at these sockets; the thread that owns a socket closes it."""
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
