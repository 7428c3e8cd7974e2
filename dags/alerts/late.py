"""What is done when a run of dispatch_store is late; Airflow calls it on a worker."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


def tell(**context: Any) -> None:
    """Tell it in the log."""
    log.error("the dispatcher of the store has not ended in time: messages may be late")
