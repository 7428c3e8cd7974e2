"""Run ministack with a clock that can be moved forwards: python ministack_clock.py CONTROL_PORT.

``POST /?by=SECONDS`` to 127.0.0.1:CONTROL_PORT adds to the offset; ``GET /`` answers the offset. It moves what SQS
sees and the Date header of the answers; asyncio's timers stay real, so an open long poll looks again within 0.1 s.
It relies on ministack's module layout, hence the pinned version and a smoke test.
"""

from __future__ import annotations

import sys
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Clock:
    """Stands in for the module ``time``: all of it, with ``time()`` moved."""

    def __init__(self) -> None:
        self.offset = 0.0
        self._lock = threading.Lock()

    def time(self) -> float:
        return time.time() + self.offset

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("the clock never goes back")
        with self._lock:
            self.offset += seconds

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


def control(clock: Clock, port: int) -> None:
    """Serve the clock's control port from a thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            clock.advance(float(parse_qs(urlsplit(self.path).query)["by"][0]))
            self._answer()

        def _answer(self) -> None:
            body = repr(clock.offset).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> None:
    clock = Clock()
    import ministack.app
    import ministack.services.sqs

    ministack.services.sqs.time = clock
    ministack.app.formatdate = lambda timeval=None, **how: formatdate(timeval or clock.time(), **how)
    control(clock, int(sys.argv[1]))
    sys.argv = sys.argv[:1]
    ministack.app.main()


if __name__ == "__main__":
    main()
