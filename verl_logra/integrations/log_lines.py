"""Makes warnings of this package visible in every process of verl.

With vLLM installed, the package ``model_hosting_container_standards`` that it imports turns the root logger of a worker
down to errors, and with it every other package's warnings. Ours say why a full sync was due or a step was skipped.
"""

import logging
import os


class _WhereRootIsSilent(logging.Handler):
    """Writes what no handler of the root logger would write."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = logging.StreamHandler()
        self._stream.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not any(handler.level <= record.levelno for handler in logging.root.handlers):
            self._stream.handle(record)


def show_log_lines(package: str = "verl_logra") -> None:
    """Level from ``VERL_LOGGING_LEVEL``, as in verl; a second call changes nothing."""
    logger = logging.getLogger(package)
    if not any(isinstance(handler, _WhereRootIsSilent) for handler in logger.handlers):
        logger.setLevel(os.environ.get("VERL_LOGGING_LEVEL", "WARNING").upper())
        logger.addHandler(_WhereRootIsSilent())
