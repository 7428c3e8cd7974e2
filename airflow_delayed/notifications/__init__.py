"""Notifiers: callbacks of DAGs, tasks and deadlines that store delayed messages, and take them back."""

from __future__ import annotations
