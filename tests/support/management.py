"""A management API of RabbitMQ that answers what a test wants, for what no broker of one node can show."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@contextmanager
def made_up(answer: Callable[[str], object]) -> Iterator[str]:
    """Yield its URL until the block ends.

    :param answer: returns the JSON for a path below ``/api/``, without the query; None: the user may not see it.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answer(self.path.partition("?")[0].removeprefix("/api/"))
            body = json.dumps(found).encode()
            self.send_response(401 if found is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
