"""verl on its CPU platform, inside the test process."""

import os

os.environ["VERL_PLATFORM"] = "cpu"
