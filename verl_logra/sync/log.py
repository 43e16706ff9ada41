"""The trainer's committed updates that some receiver may still need, in host memory."""

import uuid
from collections import deque

from verl_logra.core.factor import AppliedUpdate


class UpdateLog:
    """Listens to an optimizer's commits. Bounded: the oldest update goes when there are more than ``max_updates``.

    ``history`` names the line of weights that the update numbers count along. It changes when the weights change in a
    way that no update describes, and receivers of another history need a full sync.
    """

    def __init__(self, num_updates: int, max_updates: int = 64) -> None:
        self.max_updates = max_updates
        self._updates: deque[AppliedUpdate] = deque()
        self._done: dict[str, int] = {}
        self.last = num_updates
        self.history = ""
        self.why = ""
        """Why this history began; the reason of the full sync that follows."""
        self.restart(num_updates, "first sync")

    def restart(self, num_updates: int, why: str) -> None:
        """Forgets everything: the weights are no longer those that the updates led to."""
        self._updates.clear()
        self._done.clear()
        self.last = num_updates
        self.history = uuid.uuid4().hex[:16]
        self.why = why

    def __call__(self, applied: AppliedUpdate) -> None:
        """Takes one committed update; codes and coefficients are copied to the host."""
        if applied.number != self.last + 1:
            self.restart(applied.number, f"update {applied.number} was committed after update {self.last}")
        elif applied.factors is None:
            self.restart(applied.number, f"the product of the factors of update {applied.number} is not exact")
        else:
            host = [(codes.cpu(), coefficient.cpu()) for codes, coefficient in applied.factors]
            self._updates.append(AppliedUpdate(applied.number, applied.refresh, applied.decay, host))
            self.last = applied.number
        if len(self._updates) > self.max_updates:
            self._updates.popleft()

    @property
    def oldest_base(self) -> int:
        """The oldest update from which the log still leads to ``last``."""
        return self.last - len(self._updates)

    def since(self, number: int) -> list[AppliedUpdate] | None:
        """Updates ``number + 1`` to ``last``; None if some of them are gone."""
        return [u for u in self._updates if u.number > number] if number >= self.oldest_base else None

    def done(self, receivers: str, number: int) -> None:
        """A group of receivers has arrived at update ``number``; what all groups have is dropped."""
        self._done[receivers] = number
        while self._updates and self._updates[0].number <= min(self._done.values()):
            self._updates.popleft()

    def num_bytes(self) -> int:
        """Bytes held on this rank's host."""
        return sum(q.numel() + 4 * c.numel() for update in self._updates if update.factors for q, c in update.factors)
