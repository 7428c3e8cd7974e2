"""What `make demo` and `make demo-ui` print while they work."""

from __future__ import annotations

import time


class Progress:
    """Prints each step as it begins, and knows how long the steps took."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, float]] = []

    def step(self, name: str, text: str) -> None:
        """Begin a step, which ends the one before."""
        self._steps.append((name, time.monotonic()))
        self._print(f"{name:<10}{text}".rstrip())

    def _print(self, text: str) -> None:
        print(f"{time.monotonic() - self._steps[0][1]:4.0f} s  {text}", flush=True)

    def detail(self, text: str) -> None:
        self._print(f"{'':<10}{text}")

    def times(self) -> str:
        """Return a table of the steps and their seconds."""
        began = [moment for _, moment in self._steps] + [time.monotonic()]
        rows = [(name, end - begin) for (name, begin), end in zip(self._steps, began[1:], strict=True)]
        return "\n".join(f"  {name:<23}{seconds:6.0f} s" for name, seconds in [*rows, ("all", began[-1] - began[0])])
