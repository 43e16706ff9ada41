"""A two-way channel between one master and the receivers of a sync, over zmq, with a bound on every wait.

verl's checkpoint engines carry tensors one way; a low-rank sync also needs to know what the receivers have and whether
they got it. Every message is (sync id, receiver, content): what is left over from a sync that failed is dropped.
"""

from __future__ import annotations

import pickle
import time
import uuid
from collections import deque
from typing import Any

import zmq


class MasterChannel:
    """The master's end. A receiver that missed one wait is not waited for again in the same sync."""

    def __init__(self, ip: str, seconds: float) -> None:
        self._seconds = seconds
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, int(1000 * seconds))
        ipv6 = ":" in ip
        self._socket.setsockopt(zmq.IPV6, int(ipv6))
        host = f"[{ip}]" if ipv6 else ip
        self.address = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self.sync_id = ""
        self._inboxes: dict[int, deque[Any]] = {}
        self._identities: dict[int, bytes] = {}
        self.silent: set[int] = set()
        """Receivers that did not answer in time."""

    def new_sync(self) -> str:
        self.sync_id = uuid.uuid4().hex
        return self.sync_id

    def expect(self, num_receivers: int) -> None:
        self._inboxes = {receiver: deque() for receiver in range(num_receivers)}
        self._identities.clear()
        self.silent.clear()

    def gather(self) -> dict[int, Any]:
        """The next message of every receiver that still answers; what came early is kept for the next time."""
        deadline = time.monotonic() + self._seconds
        while missing := [r for r, inbox in self._inboxes.items() if not inbox and r not in self.silent]:
            left = deadline - time.monotonic()
            if left <= 0 or not self._socket.poll(int(1000 * left) + 1):
                self.silent.update(missing)
                break
            identity, data = self._socket.recv_multipart()
            sync_id, receiver, content = pickle.loads(data)
            if sync_id == self.sync_id:
                self._identities[receiver] = identity
                self._inboxes[receiver].append(content)
        return {r: inbox.popleft() for r, inbox in self._inboxes.items() if inbox and r not in self.silent}

    def broadcast(self, content: Any, buffer: Any = b"") -> None:
        """To every receiver that answered before; ``buffer`` travels beside the pickled content, without a copy."""
        data = pickle.dumps((self.sync_id, -1, content))
        for receiver, identity in self._identities.items():
            if receiver not in self.silent:
                self._socket.send_multipart([identity, data, buffer], copy=False)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class ReceiverChannel:
    """A receiver's end, for one sync."""

    def __init__(self, address: str, sync_id: str, receiver: int, seconds: float) -> None:
        self._sync_id, self._receiver, self._seconds = sync_id, receiver, seconds
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        self._socket.connect(address)

    def send(self, content: Any) -> None:
        self._socket.send_multipart([pickle.dumps((self._sync_id, self._receiver, content))])

    def receive(self) -> tuple[Any, memoryview]:
        """The next content and buffer.

        Raises:
            TimeoutError: the master gave no sign of life.
        """
        if not self._socket.poll(int(1000 * self._seconds)):
            raise TimeoutError(
                f"the trainer gave no sign of life for {self._seconds:g} s during a weight sync "
                f"(rollout.checkpoint_engine.engine_kwargs.logra.timeout_seconds)"
            )
        data, buffer = self._socket.recv_multipart(copy=False)
        sync_id, _, content = pickle.loads(data.buffer)
        assert sync_id == self._sync_id, "the socket is of this sync alone"
        return content, buffer.buffer

    def close(self) -> None:
        self._socket.close()
        self._context.term()
