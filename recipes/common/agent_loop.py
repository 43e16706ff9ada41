"""verl's single-turn agent loop with a sampling seed per answer, so that equal runs draw equal answers.

vLLM otherwise draws from one random stream in the order in which requests happen to be scheduled. verl's own
``rollout.full_determinism`` gives every request the same seed, hence all answers of a GRPO group the same text.
"""

import hashlib
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


def sampling_seed(*, run_seed: int, question: int, answer: int) -> int:
    """A 32-bit seed for one answer to one question; depends on nothing that a resumed run would not know."""
    digest = hashlib.blake2b(f"{run_seed}/{question}/{answer}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


class SeededAgentLoop(SingleTurnAgentLoop):
    """Needs ``extra_info.index`` (the question) and verl's ``priority`` (the place of the answer in its batch)."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        if "priority" not in kwargs:
            raise ValueError("this trainer gives answers no number to seed them by: set trainer.use_v1=False")
        seed = sampling_seed(
            run_seed=self.rollout_config.seed,
            question=int(kwargs["extra_info"]["index"]),
            answer=int(kwargs["priority"]),
        )
        return await super().run({**sampling_params, "seed": seed}, **kwargs)
