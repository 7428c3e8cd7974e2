"""Run one server until the standard input ends, and print its URL: python -m services postgres."""

from __future__ import annotations

import sys
from importlib import import_module

with import_module(f"services.{sys.argv[1]}").running() as server:
    print(server.url, flush=True)
    sys.stdin.read()
