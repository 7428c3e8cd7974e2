"""Reading messages from rows: columns, files, checks."""

from __future__ import annotations
