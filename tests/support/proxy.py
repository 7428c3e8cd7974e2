"""A TCP proxy in front of a broker, which can cut its connections or fall silent."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Proxy:
    """Passes on what comes in at ``port``, until told otherwise.

    :param target: the port that it stands for.
    :param host: and the host.
    """

    def __init__(self, target: int, host: str = "127.0.0.1") -> None:
        #: How many connections were taken so far.
        self.taken = 0
        self._target = host, target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._silent: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """Cut all connections with a reset, as a firewall does; return how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    end.shutdown(socket.SHUT_RDWR)
        return len(pairs)

    def fall_silent(self) -> int:
        """Pass nothing on any more over the connections that there are; return how many. New ones work."""
        with self._lock:
            self._silent.update(end for pair in self._pairs for end in pair)
            return len(self._pairs)

    def swallow_answers(self) -> int:
        """Pass on only what clients send, over the connections that there are; return how many. New ones work."""
        with self._lock:
            self._silent.update(server for _, server in self._pairs)
            return len(self._pairs)

    def hang(self) -> None:
        """Pass nothing on for a while, over any connection."""
        self._flowing.clear()

    def go_on(self) -> None:
        """Pass on what has come in meanwhile, and all that comes."""
        self._flowing.set()

    def close(self) -> None:
        self.go_on()
        # a close alone does not wake the thread that accepts
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    client.close()
                    continue
                with self._lock:
                    self.taken += 1
                    self._pairs.append((client, server))
                both = threading.Barrier(2)
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(one, other, both), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket, both: threading.Barrier) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65_536):
                self._flowing.wait()
                # what comes after it fell silent is swallowed
                if one not in self._silent:
                    other.sendall(data)
        if one not in self._silent:
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=60)
        one.close()


@contextlib.contextmanager
def proxy(target: int, host: str = "127.0.0.1") -> Iterator[Proxy]:
    made = Proxy(target, host)
    try:
        yield made
    finally:
        made.close()
