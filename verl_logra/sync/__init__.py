"""Exact low-rank weight sync: wire format, trainer's side and rollout's side. Torch only: no verl, vLLM or ray.

- ``checksum``: one sum that notices a corrupted byte and compares weights whatever their sharding;
- ``wire``: the message, frame by frame; the place to read for another implementation;
- ``log``: the committed updates that some receiver may still need;
- ``plan``: whether a sync can be low-rank, and if not, why;
- ``sender``: a message from FSDP2 shards, never a dense weight;
- ``receiver``: a message into slices of the rollout's parameters;
- ``session``: one sync from the trainer's side, across its ranks.
"""
