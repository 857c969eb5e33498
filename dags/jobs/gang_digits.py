"""Train one classifier of handwritten digits on all members of a gang; rank 0 prints the result as JSON.

Every member computes the gradient of its part of each batch; the mean of all is taken over the network, by
torch's gloo where torch is installed, else by sockets. So all have the same weights after every step.
"""

import argparse
import json
import os
import socket
import struct
import time

import numpy as np
from digits import BATCH, accuracy_of, digits, first_weights, gradients

RANK = int(os.environ.get("GPU_NODE_RANK", "0"))
MEMBERS = int(os.environ.get("GPU_NODES_NUM", "1"))
MEETING = (os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0")))
MEETING_TIMEOUT_S = 120.0


def at_once(peer):
    """Let the peer send small messages without waiting for more: each step sends several."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


class Sockets:
    """Messages of all members by way of rank 0, which the others connect to."""

    def __init__(self):
        if RANK == 0:
            with socket.create_server(MEETING) as server:
                server.settimeout(MEETING_TIMEOUT_S)
                self.peers = [at_once(server.accept()[0]) for _ in range(MEMBERS - 1)]
            return
        deadline = time.monotonic() + MEETING_TIMEOUT_S
        while True:
            try:
                self.peers = [at_once(socket.create_connection(MEETING, timeout=MEETING_TIMEOUT_S))]
                return
            except ConnectionRefusedError:  # rank 0 does not listen yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def all_texts(self, text):
        """Return the texts of all members in any order; every member has to call it."""
        return [data.decode() for data in self._all(text.encode())]

    def mean(self, array):
        """Return the mean of the members' arrays."""
        return np.mean([np.frombuffer(data, array.dtype) for data in self._all(array.tobytes())], axis=0)

    def _all(self, data):
        if RANK == 0:
            parts = [data, *(receive(peer) for peer in self.peers)]
            for peer in self.peers:
                for part in parts:
                    send(peer, part)
            return parts
        send(self.peers[0], data)
        return [receive(self.peers[0]) for _ in range(MEMBERS)]


class Gloo:
    """Messages of all members by torch."""

    def __init__(self):
        import torch.distributed

        self.torch, self.dist = torch, torch.distributed
        address, port = MEETING
        self.dist.init_process_group(
            "gloo", rank=RANK, world_size=MEMBERS, init_method=f"tcp://{address}:{port}"
        )

    def all_texts(self, text):
        texts = [None] * MEMBERS
        self.dist.all_gather_object(texts, text)
        return texts

    def mean(self, array):
        total = self.torch.from_numpy(np.ascontiguousarray(array))
        self.dist.all_reduce(total)
        return total.numpy() / MEMBERS


def send(peer, data):
    peer.sendall(struct.pack("!Q", len(data)) + data)


def receive(peer):
    return exactly(peer, struct.unpack("!Q", exactly(peer, 8))[0])


def exactly(peer, size):
    data = bytearray()
    while len(data) < size:
        piece = peer.recv(size - len(data))
        if not piece:
            raise ConnectionError("another member of the gang has ended")
        data += piece
    return bytes(data)


def group():
    try:
        return Gloo()
    except ImportError:
        return Sockets()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=0.3)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    started_at = time.time()
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    server = os.environ.get("GPU_SERVER", "")
    print(f"rank {RANK} of {MEMBERS} on {server}: CUDA_VISIBLE_DEVICES={devices}", flush=True)

    (x, y), (x_test, y_test) = digits()
    members = group()
    random = np.random.default_rng(0)  # the same in all members: weights and order of the data
    weights = first_weights(options.width, random)
    for epoch in range(1, options.epochs + 1):
        order = random.permutation(len(x))
        for start in range(0, len(x) - MEMBERS, BATCH):
            part = order[start : start + BATCH][RANK::MEMBERS]
            own = gradients(weights, x[part], y[part])
            mean = members.mean(np.concatenate([gradient.ravel() for gradient in own]))
            for weight in weights:
                gradient, mean = mean[: weight.size], mean[weight.size :]
                weight -= options.learning_rate * gradient.reshape(weight.shape).astype(np.float32)
        if RANK == 0:
            accuracy = accuracy_of(weights, x_test, y_test)
            print(f"epoch {epoch:2d} of {options.epochs}: accuracy {accuracy:.4f}", flush=True)
    checksum = float(sum(np.abs(weight).sum(dtype=np.float64) for weight in weights))
    report = {
        "rank": RANK,
        "server": server,
        "cuda_visible_devices": devices,
        "checksum": checksum,
        "started_at": started_at,
        "ended_at": time.time(),
    }
    reports = [json.loads(text) for text in members.all_texts(json.dumps(report))]
    reports.sort(key=lambda each: each["rank"])
    if RANK == 0:
        result = {
            "accuracy": round(accuracy_of(weights, x_test, y_test), 4),
            "backend": type(members).__name__.lower(),
            "members": reports,
        }
        print(json.dumps({**reports[0], **result}), flush=True)


if __name__ == "__main__":
    main()
