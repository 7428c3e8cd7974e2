"""How large the package is, and how many of its files one message passes on its way.

    .venv/bin/python .ci/measures.py [--size]

Lines are counted as they stand, their mean length without blank ones, and functions from `def` to their last line. What
stands twice is counted as .ci/guards.py does. A thread is started by hand where no function of threads.py does it. Then
three things are done for real, on a private RabbitMQ and a store in SQLite: a send, a dispatch, and a cancel by its
tag through the page's API. Each is done once before, so that imports do not count. Printed are the package's files on
the Python stack at the decisive moment, with those on the stacks of the threads that started the one at work; and in
brackets the files of which any function ran until then. `--size` leaves these three out.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import guards

TOP = Path(__file__).resolve().parent.parent
PACKAGE = TOP / "airflow_delayed"
QUEUE = "orders"
TAG = "customer-7"
HOOK = "airflow_delayed.hooks.store"
THREADS = "airflow_delayed.threads"


def sizes() -> None:
    """Print how many files and lines there are, and how long lines and functions are."""
    files = sorted(PACKAGE.rglob("*.py"))
    texts = [file.read_text() for file in files]
    lines = [line for text in texts for line in text.splitlines()]
    lengths = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    print(f"files: {len(files)}")
    print(f"lines: {len(lines)}")
    print(f"mean length of a line: {statistics.mean(len(line) for line in lines if line.strip()):.1f}")
    print(f"functions: {len(lengths)}")
    print(f"length of a function, median: {statistics.median(lengths):g}")
    print(f"length of a function, 90th percentile: {statistics.quantiles(lengths, n=10)[-1]:g}")


def structure() -> None:
    """Print what stands twice, what only one module imports, and what an import of the store's hook loads."""
    package = guards.Package(PACKAGE)
    twice = Counter(one.rule for one in guards.names_twice(package))
    importers = Counter(imported for _, imported in {(one.importer, one.imported) for one in package.imports})
    nodes = [node for module, tree in package.trees.items() if module != THREADS for node in ast.walk(tree)]
    by_hand = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Thread")]
    print(f"constants with the name of another: {twice['constant']}")
    print(f"functions with the name of another: {twice['function']}")
    print(f"modules that one other imports: {list(importers.values()).count(1)}")
    print(f"threads started by hand: {len(by_hand)}")
    loaded = f"import sys, {HOOK}; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", loaded], cwd=TOP, check=True, capture_output=True, text=True)
    names = modules.stdout.splitlines()[-1].split()
    own = [name for name in names if name.partition(".")[0] == PACKAGE.name]
    print(f"modules that `import {HOOK}` loads: {len(own)} of the package, {len(names)} in all")


class Watch:
    """Sees which files of the package are on the stack when a moment comes, and which have run until then."""

    def __init__(self) -> None:
        self.stack: set[str] = set()
        self.ran: set[str] = set()
        self._over = True
        self._starter = threading.local()

    def begin(self) -> None:
        self.stack, self.ran, self._over = set(), set(), False
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def end(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        if not self.stack:
            raise SystemExit("the moment that was watched for did not come")

    def moment(self) -> None:
        """Take the stack, the first time only."""
        if not self._over:
            self._over = True
            self.stack = self.now()

    def now(self) -> set[str]:
        """Return the files on this thread's stack, and on those of the threads that it was started by."""
        files: set[str] = set(getattr(self._starter, "files", ()))
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            files |= self._file_of(frame)
            frame = frame.f_back
        return files

    def carried(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same work, which remembers in its thread who started it."""
        files = self.now()

        def carrying(*arguments: Any, **named: Any) -> Any:
            self._starter.files = files
            return work(*arguments, **named)

        return carrying

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and not self._over:
            self.ran |= self._file_of(frame)

    def _file_of(self, frame: FrameType) -> set[str]:
        path = Path(frame.f_code.co_filename)
        return {str(path.relative_to(PACKAGE))} if path.is_relative_to(PACKAGE) else set()


def install(watch: Watch) -> None:
    """Have threads know who started them, for the rest of this process."""
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def started(thread: threading.Thread) -> None:
        thread.run = watch.carried(thread.run)
        start(thread)

    def submitted(pool: ThreadPoolExecutor, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        return submit(pool, watch.carried(work), *arguments, **named)

    threading.Thread.start = started
    ThreadPoolExecutor.submit = submitted


@contextmanager
def written(watch: Watch, marker: bytes) -> Iterator[None]:
    """Watch for a write to a socket that has the marker in it."""
    send = socket.socket.send

    def seen(sock: socket.socket, data: Any, *flags: int) -> int:
        if marker in bytes(data):
            watch.moment()
        return send(sock, data, *flags)

    socket.socket.send = seen
    try:
        yield
    finally:
        socket.socket.send = send


@contextmanager
def deleted(watch: Watch, table: str) -> Iterator[None]:
    """Watch for a DELETE of rows of a table."""
    from sqlalchemy import Engine, event

    rows_of = re.compile(rf'DELETE FROM "?{table}"?\s')

    def seen(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if rows_of.match(statement):
            watch.moment()

    event.listen(Engine, "before_cursor_execute", seen)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", seen)


def ways() -> None:
    """Print the files that a send, a dispatch and a cancel pass."""
    with tempfile.TemporaryDirectory(prefix="airflow-delayed-measures-") as folder:
        os.environ.update(
            AIRFLOW_HOME=folder,
            AIRFLOW__CORE__LOAD_EXAMPLES="False",
            AIRFLOW__LOGGING__LOGGING_LEVEL="ERROR",
            AIRFLOW__DELAYED__PAGE_STORES="store",
            AIRFLOW_CONN_STORE=f'{{"conn_type": "sqlite", "host": "{folder}/store.db"}}',
        )
        sys.path[:0] = [str(TOP), str(TOP / "tests")]
        from services import rabbitmq

        with rabbitmq.running() as broker:
            os.environ["AIRFLOW_CONN_BROKER"] = f"rabbitmq://guest:guest@127.0.0.1:{broker.port}/"
            _ways(Path(folder))


def _ways(folder: Path) -> None:
    from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
    from airflow_delayed.hooks.store import DelayedStoreHook

    watch = Watch()
    install(watch)
    with closing(RabbitMQDelayHook("broker")) as hook:
        hook.install([QUEUE], create_destinations=True)
    with closing(DelayedStoreHook("store", "broker")) as store:
        store.install([])
        table = store.tables.messages.name
        _both(watch, "socket write of a send", _send(), written(watch, b"body of 2"))
        _both(watch, "settling SQL of a dispatched row", _dispatch(store), deleted(watch, table))
        with _cancel(store, folder) as cancel:
            _both(watch, "cancelling SQL of a cancel by tag", cancel, deleted(watch, table))


def _both(watch: Watch, name: str, work: Callable[[int], None], watching: Any) -> None:
    """Do the work once before, and once while the moment is watched for."""
    work(1)
    with watching:
        watch.begin()
        try:
            work(2)
        finally:
            watch.end()
    print(f"\n{name}: {len(watch.stack)} files on the stack ({len(watch.ran)} ran)")
    print("  " + " ".join(sorted(watch.stack)))


def _send() -> Callable[[int], None]:
    from airflow_delayed.operators.send import DelayedSendOperator

    def send(number: int) -> None:
        task = DelayedSendOperator(
            task_id="send", conn_id="broker", messages=[{"body": f"body of {number}"}], destination=QUEUE, delay=60
        )
        ti = SimpleNamespace(
            dag_id="dag", run_id=f"run-{number}", task_id="send", map_index=-1, max_tries=0, try_number=1
        )
        ti.xcom_push = lambda key, value: None
        task.execute({"ti": ti})

    return send


def _fill(store: Any, number: int, seconds: float) -> None:
    from datetime import timedelta

    from airflow_delayed.message import DelayedMessage

    due = store.now() + timedelta(seconds=seconds)
    fields: dict[str, Any] = {"destination": QUEUE, "due_at": due, "tag": TAG}
    store.send([DelayedMessage(body=b"stored", message_id=f"{seconds}-{number}", **fields)])


def _dispatch(store: Any) -> Callable[[int], None]:
    from airflow_delayed.operators.dispatch import StoreDispatchOperator

    def dispatch(number: int) -> None:
        # the watched work begins with the operator
        profile = sys.getprofile()
        sys.setprofile(None)
        _fill(store, number, -1)
        sys.setprofile(profile)
        StoreDispatchOperator(task_id="dispatch", store_conn_id="store", deliver_conn_ids="broker").execute({})

    return dispatch


@contextmanager
def _cancel(store: Any, folder: Path) -> Iterator[Callable[[int], None]]:
    from airflow.utils.db import initdb
    from support.operations_page import serving

    initdb()
    with serving(folder) as page:

        def cancel(number: int) -> None:
            profile = sys.getprofile()
            sys.setprofile(None)
            _fill(store, number, 3600)
            sys.setprofile(profile)
            # the page answers in a thread that runs already
            page._client.portal.call(sys.setprofile, profile)
            page.post("/api/v1/stores/store/cancel", filter={"tag": TAG}, dry_run=False)

        yield cancel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", action="store_true", help="walk no message's way")
    arguments = parser.parse_args()
    started = time.monotonic()
    sizes()
    structure()
    if not arguments.size:
        ways()
        print(f"\n({time.monotonic() - started:.0f} s)", file=sys.stderr)


if __name__ == "__main__":
    main()
