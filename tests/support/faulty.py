"""A way to SQS that breaks at random: requests that never arrive, answers that get lost, a server that is too busy."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

#: What may go wrong with a request, in turn.
FAULTS = ("request lost", "answer lost", "too busy")
_BUSY = b'{"__type":"com.amazonaws.sqs#ServiceUnavailable","message":"on purpose"}'


@contextlib.contextmanager
def faulty(url: str, *, seed: int, share: float, actions: tuple[str, ...]) -> Iterator[tuple[str, Counter[str]]]:
    """Forward to an endpoint, and spoil a share of the requests of these actions; yield its own URL, and the counts."""
    target = urlsplit(url).netloc
    choose, lock = random.Random(seed), threading.Lock()
    counts: Counter[str] = Counter()
    faults = {action: itertools.cycle(FAULTS) for action in actions}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # an answer in one piece: in two, the second would wait 40 ms for the first to be acknowledged
        wbufsize = -1

        def setup(self) -> None:
            super().setup()
            self.onward = http.client.HTTPConnection(target, timeout=60)

        def finish(self) -> None:
            self.onward.close()
            with contextlib.suppress(OSError):
                super().finish()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            action = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
            with lock:
                fault = next(faults[action]) if action in actions and choose.random() < share else None
                counts[f"{action}: {fault}" if fault else "forwarded"] += 1
            if fault == "request lost":
                self.close_connection = True
                return
            if fault == "too busy":
                self._answer(503, {"Content-Type": "application/x-amz-json-1.0"}, _BUSY)
                return
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            self.onward.request("POST", self.path, body, headers)
            answer = self.onward.getresponse()
            content = answer.read()
            if fault == "answer lost":
                self.close_connection = True
                return
            self._answer(answer.status, dict(answer.getheaders()), content)

        def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, *_: object) -> None:
            # a client that was killed
            pass

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", counts
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
