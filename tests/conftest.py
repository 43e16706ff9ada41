"""Shapes and dtypes in the signatures of the core are checked at run time, in the tests alone.

One thread per process: results do not depend on the machine's cores, and ranks do not fight for them. verl runs on its
CPU platform, which it chooses once, at its first import in the process.
"""

import os

os.environ["VERL_PLATFORM"] = "cpu"

import torch
from jaxtyping import install_import_hook

torch.set_num_threads(1)
install_import_hook("verl_logra.core", "beartype.beartype")
