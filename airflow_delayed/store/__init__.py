"""The SQL store, in which messages wait until they may be dispatched."""

from __future__ import annotations
