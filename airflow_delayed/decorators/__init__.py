"""The task decorators."""

from __future__ import annotations
