"""verl's agent loops with a sampling seed per answer, so that equal runs draw equal answers.

vLLM otherwise draws from one random stream in the order in which requests happen to be scheduled. verl's own
``rollout.full_determinism`` gives every request the same seed, hence all answers of a GRPO group the same text.
"""

import hashlib
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop


def sampling_seed(*, run_seed: int, question: int, answer: int) -> int:
    """A 32-bit seed for one answer to one question; depends on nothing that a resumed run would not know."""
    digest = hashlib.blake2b(f"{run_seed}/{question}/{answer}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


class _Seeded:
    """Mixin. Needs ``extra_info.index``, the question, and numbers the answers as verl does: by ``priority``, the place
    in the batch, under the older trainer; by ``session_id``, the place among the question's answers, under the current.
    """

    rollout_config: Any

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        seed = sampling_seed(
            run_seed=self.rollout_config.seed,
            question=int(kwargs["extra_info"]["index"]),
            answer=int(kwargs["priority"] if "priority" in kwargs else kwargs["session_id"]),
        )
        return await super().run({**sampling_params, "seed": seed}, **kwargs)  # type: ignore[misc]


class SeededAgentLoop(_Seeded, SingleTurnAgentLoop):
    """One question, one answer."""


class SeededToolAgentLoop(_Seeded, ToolAgentLoop):
    """The model may call tools before it answers."""
