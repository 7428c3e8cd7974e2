"""The triggers."""

from __future__ import annotations
