"""What the checks of the project's own tools share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def here() -> Path:
    """The top of the repository."""
    return Path(__file__).resolve().parents[2]
