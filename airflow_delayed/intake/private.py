"""Files of this machine: which file systems have them, and how to make them for their owner alone."""

from __future__ import annotations

import os
from typing import Any


def is_local(fs: Any) -> bool:
    """Return whether a fsspec file system is that of this machine."""
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def private(path: str, flags: int) -> int:
    """Open a file that its owner alone may read, and follow no link: an ``opener`` for :func:`open`."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)
