"""verl's weight transfer between a trainer and the vLLM worker on its device, with a bound on every wait."""

from typing import Any

import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender


def _bound(socket: Any, seconds: float) -> None:
    for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
        socket.setsockopt(option, int(1000 * seconds))
    socket.setsockopt(zmq.LINGER, 0)


class BoundedSender(BucketedWeightSender):
    """Raises ``zmq.Again`` when the worker gives no sign of life for ``seconds``."""

    def __init__(self, *args: Any, seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = seconds

    def _init_socket(self) -> None:
        super()._init_socket()
        _bound(self.socket, self._seconds)


class BoundedReceiver(BucketedWeightReceiver):
    """Raises ``zmq.Again`` when the trainer gives no sign of life for ``seconds``."""

    def __init__(self, *args: Any, seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = seconds

    def _init_socket(self) -> None:
        super()._init_socket()
        _bound(self.socket, self._seconds)
