"""The SQL store, in which messages wait until they may be handed over."""

from __future__ import annotations
