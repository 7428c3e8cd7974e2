"""What Airflow calls, on a worker, when a run of dispatch_store is late."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


def report(**context: Any) -> None:
    """Write it to the log."""
    log.error("the dispatcher of the store has not ended in time: messages may be late")
