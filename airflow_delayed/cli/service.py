"""A dispatcher as a service: it stays until a signal ends it, whatever fails meanwhile.

Each connection has a :class:`ConnectionLoop` of its own, so that a broker that is away holds up no other. When a loop
fails, its connection gets a new one after a growing pause, as a task would be tried again. :class:`ProbeServer` answers
over HTTP whether the process is well.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, SimpleQueue
from threading import Event, Lock
from types import TracebackType
from typing import Any, NamedTuple

from airflow.providers.common.compat.sdk import AirflowNotFoundException

from airflow_delayed import metrics
from airflow_delayed.clock import Backoff
from airflow_delayed.delivery import Clock, delivery_for
from airflow_delayed.errors import DelayedError, UnsupportedConnection, about, explained
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.dispatch.dispatcher import Dispatcher
from airflow_delayed.store.dispatch.limits import RateLimit
from airflow_delayed.store.dispatch.loop import PASS_EVERY
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.threads import start_thread

log = logging.getLogger(__name__)

#: Seconds without a byte of its request, after which a client's connection is closed.
REQUEST_SECONDS = 5.0
#: Connections that are open at a time, each with a thread.
MAX_CONNECTIONS = 16


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    content_type: str
    content: bytes


def health(healthy: bool, details: Mapping[str, object]) -> Answer:
    """Return the answer of a probe, in JSON: 200, or 503 if it is not healthy."""
    return Answer(200 if healthy else 503, "application/json", json.dumps(details).encode() + b"\n")


class ProbeServer:
    """Answers GET within a ``with`` block, in threads that keep no process from ending.

    :param host: a name, or an address of IPv4 or IPv6, such as ``::1``.
    :param port: 0 takes any free port.
    :param answers: by path; called for each request, from any thread.
    :raises OSError: the port is in use, or may not be used.
    """

    def __init__(self, host: str, port: int, answers: Mapping[str, Callable[[], Answer]]) -> None:
        class Handler(_Handler):
            paths = answers

        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]

        class Server(_Server):
            address_family = family

        self._server = Server((str(address[0]), port), Handler)
        self.port: int = self._server.server_address[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def __enter__(self) -> ProbeServer:
        start_thread(self._server.serve_forever, "delayed-probes")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Answers each connection in a thread of its own, and drops the oldest connection for one more than may be open.

    So a client that sends its request a byte at a time, or never, costs no more than that, and keeps no probe waiting.
    """

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[int, socket.socket] = {}
        self._lock = Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[id(request)] = request
            if len(self._open) > MAX_CONNECTIONS:
                oldest = self._open.pop(next(iter(self._open)))
                with suppress(OSError):
                    # its thread reads the end of the request, and closes it
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("A client of the probes ended its connection: %s", getattr(sys.exc_info()[0], "__name__", ""))


class _Handler(BaseHTTPRequestHandler):
    paths: Mapping[str, Callable[[], Answer]] = {}
    timeout = REQUEST_SECONDS
    #: Neither Python's version nor ours.
    server_version, sys_version = "airflow-delayed", ""

    def do_GET(self) -> None:
        answer = self.paths.get(self.path.partition("?")[0])
        status, content_type, content = answer() if answer else Answer(404, "text/plain", b"not found\n")
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


#: Seconds after the signal within which what is being sent has to end.
GRACE = 5.0
#: Seconds between two looks at a connection that is not defined, or of a type that nothing serves.
UNUSABLE_FIRST, UNUSABLE_LONGEST = 2.0, 60.0
#: How often the database is asked for its time, and how old its last answer may be; in seconds.
ASK_EVERY = 2.0
REACHABLE = 10.0
#: How old the last claim may be, in seconds; a loop claims at least once a pass.
CLAIMED = 1.5 * PASS_EVERY


class UnusableConnection(DelayedError):
    """Nothing can be delivered through a connection until somebody adds or corrects it."""


class ConnectionLoop:
    """Dispatches the messages of one connection in a thread, until it is stopped.

    :param rate: limits the messages a second, of all connections together; None: the policy's is of this one alone.
    """

    def __init__(
        self,
        conn_id: str,
        policy: DispatchPolicy,
        make_store: Callable[[], DelayedStoreHook],
        rate: RateLimit | None,
        ended: Callable[[], object],
    ) -> None:
        self.conn_id = conn_id
        #: The last try failed after it was stopped.
        self.failed = False
        self._policy = policy
        self._make_store = make_store
        self._rate = rate
        self._ended = ended
        self._stop = Event()
        self._lock = Lock()
        self._dispatcher: Dispatcher | None = None
        self._began = time.monotonic()
        self._claimed_at = -math.inf
        # the longest sleep and the longest pass, and what a database that fails may take
        breakers = (policy.time_to_trigger_store_circuit_breaker, policy.time_to_trigger_fetch_circuit_breaker)
        self._stuck_after = 3 * PASS_EVERY + max(breakers).total_seconds()
        #: Whether its thread has not ended.
        self.running = True

    def start(self) -> None:
        """Begin to dispatch."""
        start_thread(self._run, f"delayed-dispatch-{self.conn_id}")

    def stop(self) -> None:
        """Claim nothing more, and end what is being sent; from any thread."""
        self._stop.set()
        with self._lock:
            if self._dispatcher is not None:
                self._dispatcher.stop()

    @property
    def alive(self) -> bool:
        """Whether its thread runs, and has not been stuck for minutes, as with a database that does not answer."""
        dispatcher = self._dispatcher
        answered = None if dispatcher is None else dispatcher.repository.answered_at
        return self.running and time.monotonic() - max(self._began, answered or -math.inf) < self._stuck_after

    @property
    def since_claim(self) -> float:
        """How many seconds ago it last claimed, or looked and there was no message; inf: never."""
        dispatcher = self._dispatcher
        claimed = None if dispatcher is None else dispatcher.repository.claimed_at
        return time.monotonic() - max(self._claimed_at, claimed or -math.inf)

    @property
    def stalled(self) -> bool:
        """Whether it has delivered nothing for a minute of messages that have been due for as long."""
        return self._dispatcher is not None and self._dispatcher.stalled

    @property
    def in_flight(self) -> int:
        """How many messages it has leased."""
        return 0 if self._dispatcher is None else self._dispatcher.repository.in_flight

    def _run(self) -> None:
        backoff, unusable = Backoff(), Backoff(UNUSABLE_FIRST, UNUSABLE_LONGEST)
        try:
            while not self._stop.is_set():
                self._began = time.monotonic()
                try:
                    self._dispatch()
                except UnusableConnection as error:
                    self.failed = self._stop.is_set()
                    pause = unusable.next()
                    log.error("%s; the next look is in %.0f s", error, pause)
                    self._stop.wait(pause)
                except Exception as error:
                    # whatever it is, it may end while this process stays: a database that starts, a missing connection
                    self.failed = self._stop.is_set()
                    if self.since_claim < time.monotonic() - self._began:
                        backoff.reset()
                    then = "this was its end" if self.failed else "this dispatcher tries again by itself"
                    log.error("%s; %s", about(self.conn_id, error), then)
                    self._stop.wait(backoff.next())
        finally:
            self.running = False
            self._ended()

    def _dispatch(self) -> None:
        with closing(self._make_store()) as store:
            if self.conn_id != store.conn_id:
                _check_usable(self.conn_id, store.now)
            dispatcher = store.dispatcher(
                [self.conn_id], delivery_for, stays=True, rate=self._rate, **asdict(self._policy)
            )
            with self._lock:
                self._dispatcher = dispatcher
            if self._stop.is_set():
                dispatcher.stop()
            try:
                dispatcher.run("stopped")
            finally:
                self._claimed_at = max(self._claimed_at, dispatcher.repository.claimed_at or -math.inf)


class DispatchService:
    """Dispatches through several connections until SIGTERM or SIGINT, and answers probes."""

    def __init__(
        self, make_store: Callable[[], DelayedStoreHook], deliver_conn_ids: Sequence[str], policy: DispatchPolicy
    ) -> None:
        self._make_store = make_store
        #: A signal's number, or None: the loop of a connection has ended.
        self._events: SimpleQueue[int | None] = SimpleQueue()
        rate = RateLimit(policy.max_rate, time.monotonic)
        self._loops = [
            ConnectionLoop(conn_id, policy, make_store, rate, lambda: self._events.put(None))
            for conn_id in dict.fromkeys(deliver_conn_ids)
        ]
        self._answered_at = time.monotonic()
        #: Why the database did not answer the last time; empty: it did, or has not yet.
        self._problem = ""
        self._logged_reachable = True
        self._stopping = Event()

    def run(self, host: str, port: int) -> bool:
        """Dispatch until a signal; return whether all that was being sent had its end within :data:`GRACE`.

        If it had not, threads are still at work, and the process has to be ended without waiting for them. Call it in
        the main thread, which alone gets signals.

        :raises OSError: the port is in use, or may not be used.
        """
        answers = {"/live": self.live, "/ready": self.ready}
        with ExitStack() as stack:
            probes = stack.enter_context(ProbeServer(host, port, answers))
            log.info("/live and /ready are at %s", probes.url)
            store = stack.enter_context(closing(self._make_store()))
            metrics.begin_outside_tasks()
            stack.enter_context(metrics.Gauges(store))
            start_thread(lambda: self._ask(store), "delayed-ready")
            for number in (signal.SIGTERM, signal.SIGINT):
                # a SimpleQueue may be written to by a signal's handler whatever the thread does
                previous = signal.signal(number, lambda number, _: self._events.put(number))
                stack.callback(signal.signal, number, previous)
            for loop in self._loops:
                loop.start()
            received = self._next_signal()
            log.info("signal %s: what is being sent is brought to its end, within %g s", received, GRACE)
            return self._end() and received is not None

    def live(self) -> Answer:
        """Answer whether each loop runs and is not stuck."""
        alive = {loop.conn_id: loop.alive for loop in self._loops}
        return health(self._stopping.is_set() or all(alive.values()), {"alive": alive})

    def ready(self) -> Answer:
        """Answer whether the database is reachable, each connection's last claim is recent, and what is due leaves."""
        ages = {loop.conn_id: loop.since_claim for loop in self._loops}
        claimed = {name: None if math.isinf(age) else round(age, 1) for name, age in ages.items()}
        recent = all(age < CLAIMED for age in ages.values())
        stalled = [loop.conn_id for loop in self._loops if loop.stalled]
        stopping = self._stopping.is_set()
        reachable = self._reachable
        details = {"database": reachable, "seconds_since_claim": claimed, "stalled": stalled, "stopping": stopping}
        return health(reachable and recent and not stalled and not stopping, details)

    def _ask(self, store: DelayedStoreHook) -> None:
        """Ask the database for its time again and again: while the loops sleep, nothing else would miss it."""
        while not self._stopping.is_set():
            try:
                store.now()
            except Exception as error:
                self._problem, self._answered_at = explained(error), -math.inf
            else:
                self._problem, self._answered_at = "", time.monotonic()
            self._stopping.wait(ASK_EVERY)

    @property
    def _reachable(self) -> bool:
        return time.monotonic() - self._answered_at < REACHABLE

    def _log_changes(self) -> None:
        """Log that the database answers no longer, or again; not where it is asked, which may take for ever."""
        reachable = self._reachable
        if reachable == self._logged_reachable:
            return
        self._logged_reachable = reachable
        if reachable:
            log.info("the store's database answers again")
        else:
            reason = self._problem or f"nothing came for {REACHABLE:g} s"
            log.warning("the store's database does not answer, and is asked again: %s", reason)

    def _next_signal(self, deadline: float = math.inf) -> int | None:
        """Return the next signal; None: all loops have ended, or the deadline is over."""
        while any(loop.running for loop in self._loops) and (left := deadline - time.monotonic()) > 0:
            self._log_changes()
            try:
                number = self._events.get(timeout=min(left, ASK_EVERY))
            except Empty:
                continue
            if number is not None:
                return number
        return None

    def _end(self) -> bool:
        self._stopping.set()
        for loop in self._loops:
            loop.stop()
        number = self._next_signal(time.monotonic() + GRACE)
        running = [loop for loop in self._loops if loop.running]
        for loop in running:
            log.error(
                "connection %r %s; %s messages are leased, which others send when their leases end: some may come"
                " twice",
                loop.conn_id,
                f"did not end within {GRACE:g} s" if number is None else f"ended by a second signal, {number}",
                f"{loop.in_flight:,}",
            )
        return not running and not any(loop.failed for loop in self._loops)


def _check_usable(conn_id: str, clock: Clock) -> None:
    """Check that Airflow has a connection, and a transport for its type; no network."""
    try:
        delivery_for(conn_id, clock).close()
    except AirflowNotFoundException:
        raise UnusableConnection(
            f"connection {conn_id!r} is not defined in Airflow: add it, or correct --deliver-conn-ids"
        ) from None
    except UnsupportedConnection as error:
        raise UnusableConnection(str(error)) from None
