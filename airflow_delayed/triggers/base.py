"""ThreadTrigger: the base of triggers whose work blocks, and so is done in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_delayed.threads import in_thread

Payload = dict[str, Any] | None


def class_path(trigger: type[BaseTrigger]) -> str:
    """Return the path by which Airflow's database names a class: a triggerer imports that class, and no other."""
    return f"{trigger.__module__}.{trigger.__qualname__}"


class ThreadTrigger(BaseTrigger):
    """Does its work in a thread, and fires once with the payload that the work returns; with None it does not fire.

    :param arguments: the arguments of the trigger's own class, all of which JSON can hold.
    """

    #: Seconds for which an end of the trigger waits for the work in hand.
    grace = 5.0
    #: Whether the process may end before the work does.
    daemon = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arguments = arguments
        self._stopped = threading.Event()
        self._running: asyncio.Future[Payload] | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and its arguments."""
        return class_path(type(self)), dict(self.arguments)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Work in a thread, and fire when that ends."""
        self._stopped.clear()
        # not one of the loop's own threads, which are few and wanted by other triggers
        self._running = asyncio.wrap_future(in_thread(self.work, type(self).__name__, daemon=self.daemon))
        try:
            payload = await asyncio.shield(self._running)
        finally:
            await self.cleanup()
        if payload is not None:
            yield TriggerEvent(payload)

    async def cleanup(self) -> None:
        """Stop, and wait some seconds for the work in hand."""
        self.stop()
        running, self._running = self._running, None
        if running is None:
            return
        await asyncio.wait([running], timeout=self.grace)
        if not running.done():
            self.abandon()
        elif not running.cancelled():
            # else asyncio would log that nobody asked for it
            running.exception()

    @abstractmethod
    def work(self) -> Payload:
        """Do the work; it runs in the thread, and ends soon after :meth:`stop`."""

    def stop(self) -> None:
        """Let the work end soon."""
        self._stopped.set()

    def abandon(self) -> None:
        """Called when the work in hand takes longer than the trigger may wait; it goes on by itself."""
