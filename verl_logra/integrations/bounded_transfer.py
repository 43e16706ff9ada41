"""verl's weight transfer between a trainer and the vLLM worker on its device, with a bound on every wait."""

from typing import Any

import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender


class _Bounded:
    """Raises ``zmq.Again`` when the other side gives no sign of life for ``seconds``."""

    socket: Any

    def __init__(self, *args: Any, seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._milliseconds = int(1000 * seconds)

    def _init_socket(self) -> None:
        super()._init_socket()  # type: ignore[misc]
        for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
            self.socket.setsockopt(option, self._milliseconds)
        self.socket.setsockopt(zmq.LINGER, 0)


class BoundedSender(_Bounded, BucketedWeightSender):
    """The trainer's side."""


class BoundedReceiver(_Bounded, BucketedWeightReceiver):
    """The worker's side."""
