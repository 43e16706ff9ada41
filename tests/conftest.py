"""One thread per process: results do not depend on the machine's cores, and ranks do not fight for them."""

import torch

torch.set_num_threads(1)
