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
    still to be sent a second time, up to half a second later and so behind others, by nobody who listens.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.delay_s = 0.0
        self.lose_answers = 0
        self.repeat = 0
        self.partitioned = False
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._guard = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, namespace: str) -> str:
        return f"redis://127.0.0.1:{self.port}/0?namespace={namespace}"

    def cut(self) -> None:
        """Ends every connection there is."""
        with self._guard:
            pairs = list(self._pairs)
        for pair in pairs:
            self._end(pair)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                server.connect(self.target)
            except OSError:
                client.close()
                server.close()
                continue
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = (client, server)
            with self._guard:
                self._pairs.add(pair)
            for source, sink, answers in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pump, args=(pair, source, sink, answers), daemon=True).start()

    def _pump(
        self,
        pair: tuple[socket.socket, socket.socket],
        source: socket.socket,
        sink: socket.socket,
        answers: bool,
    ) -> None:
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
        self._end(pair)

    def _send_again(self, data: bytes) -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as late:
            late.settimeout(1.0)
            late.connect(self.target)
            late.sendall(data)
            late.recv(65536)

    def _end(self, pair: tuple[socket.socket, socket.socket]) -> None:
        with self._guard:
            self._pairs.discard(pair)
        for end in pair:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
