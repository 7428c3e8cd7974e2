"""The sensors."""

from __future__ import annotations
