"""Lines for the log of Spark's driver and executors, whose Python has no logging set up."""

from __future__ import annotations

import logging
import sys


def logger() -> logging.Logger:
    """Return the logger ``airflow_delayed.spark``; where nobody listens to it, it writes to standard error."""
    log = logging.getLogger("airflow_delayed.spark")
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        # Spark leads that to the driver's or the executor's own log
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
    return log
