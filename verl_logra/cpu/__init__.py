"""A CPU platform for verl, so that the whole GRPO loop runs where there is no accelerator.

Nothing here acts unless the user sets ``VERL_PLATFORM=cpu``. verl 0.9.1 and vLLM are used as they are:

- ``platform``: verl's device abstraction for the CPU, and ``device_module``, the ``torch.cuda``-like names it needs;
- ``process_group``: a valid backend string for ``torch.distributed``;
- ``engine``: verl's FSDP engines, registered for the device "cpu";
- ``vllm_worker``: a vLLM worker extension that can load weights more than once.
"""
