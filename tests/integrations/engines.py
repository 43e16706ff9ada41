"""verl's real FSDP engines on a tiny saved model, as its worker builds them, and batches like its trainer's."""

from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss, value_loss

from tests.tiny_models import VOCABULARY, tiny_model

FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


@contextmanager
def one_rank(folder):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def save_model(folder, architecture="qwen3", **changes):
    model = tiny_model(architecture, **changes)
    model.save_pretrained(folder)
    return str(folder)


def build_engine(
    model_path,
    settings=None,
    *,
    optimizer="LoGRA",
    optimizer_impl="verl_logra",
    strategy="fsdp2",
    model_type="language_model",
    lr=1e-2,
    weight_decay=0.0,
    clip_grad=1.0,
    model_options=None,
    checkpoint_contents=("model", "optimizer", "extra"),
    **engine_options,
):
    """An initialised engine; ``settings`` is the override_optimizer_config."""
    options = {"mixed_precision": FP32, "use_torch_compile": False, "use_dynamic_bsz": False, **engine_options}
    model_config = HFModelConfig(
        path=model_path,
        load_tokenizer=False,
        use_remove_padding=False,
        override_config={"attn_implementation": "sdpa"},
        model_type=model_type,
        **(model_options or {}),
    )
    engine = EngineRegistry.new(
        model_type=model_type,
        backend=strategy,
        model_config=model_config,
        engine_config=FSDPEngineConfig(strategy=strategy, micro_batch_size_per_gpu=2, **options),
        optimizer_config=FSDPOptimizerConfig(
            lr=lr,
            weight_decay=weight_decay,
            clip_grad=clip_grad,
            optimizer=optimizer,
            optimizer_impl=optimizer_impl,
            override_optimizer_config=settings,
            total_training_steps=10,
        ),
        checkpoint_config=CheckpointConfig(
            save_contents=list(checkpoint_contents), load_contents=list(checkpoint_contents)
        ),
    )
    engine.initialize()
    return engine


def batch(size=4, *, seed=0, temperature=1.0, response_lengths=None, rollout_shift=0.0, micro_batch_size=2, **extra):
    """A training mini-batch in verl's layout: jagged sequences, jagged response fields."""
    generator = torch.Generator().manual_seed(seed)
    lengths = response_lengths or torch.randint(3, 7, (size,), generator=generator).tolist()
    prompts = [torch.randint(2, VOCABULARY, (5,), generator=generator) for _ in range(size)]
    responses = [torch.randint(2, VOCABULARY, (n,), generator=generator) for n in lengths]

    def jagged(rows):
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    sequences = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    old_log_probs = [torch.full((n,), -4.0) for n in lengths]
    advantages = [
        torch.full((n,), a) for n, a in zip(lengths, torch.randn(size, generator=generator).tolist(), strict=True)
    ]
    mask = jagged([torch.ones(n) for n in lengths])
    data = TensorDict(
        {
            "input_ids": jagged(sequences),
            "position_ids": jagged([torch.arange(len(s)) for s in sequences]),
            "prompts": jagged(prompts),
            "responses": jagged(responses),
            "response_mask": mask,
            "loss_mask": mask,
            "old_log_probs": jagged(old_log_probs),
            "rollout_log_probs": jagged([o + rollout_shift for o in old_log_probs]),
            "advantages": jagged(advantages),
            "values": jagged([torch.zeros(n) for n in lengths]),
            "returns": jagged(advantages),
        },
        batch_size=[size],
    )
    options = {
        "temperature": temperature,
        "use_remove_padding": False,
        "use_dynamic_bsz": False,
        "use_fused_kernels": False,
        "micro_batch_size_per_gpu": micro_batch_size,
        "max_token_len_per_gpu": 1024,
        "pad_mode": "no_padding",
        "global_batch_size": size * dist.get_world_size(),
        "calculate_entropy": False,
    }
    tu.assign_non_tensor(data, **{**options, **extra})
    return data


def policy_loss():
    return partial(ppo_loss, config=FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2))


def critic_loss():
    return partial(value_loss, config=FSDPCriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=2))


def train(engine, data, loss=None):
    """One optimizer step through verl's own ``train_batch``; returns its metrics."""
    with engine.train_mode():
        outputs = engine.train_batch(data, loss_function=loss or policy_loss())
    return {k: v.aggregate() if hasattr(v, "aggregate") else v for k, v in outputs["metrics"].items()}
