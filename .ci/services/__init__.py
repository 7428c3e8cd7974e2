"""Real servers for the demo and the tests: each installs what it needs, runs on private ports, and is stopped."""

from __future__ import annotations
