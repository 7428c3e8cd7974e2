"""Behaviour tests for what others write for this package; they need nothing but the package itself."""

from __future__ import annotations
