"""One Store, several threads: two dispatch, and others count, cancel and discard the pool beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from support.stores import Store, Transport, on_postgres_too

from airflow_delayed.message import DelayedMessage, utcnow

#: Dispatchers that each of the two threads makes, one after the other.
DISPATCHERS = 10
#: Messages that a dispatcher finds.
MESSAGES = 20


@on_postgres_too
def test_each_thread_does_its_work_whatever_the_others_do(store: Store) -> None:
    hook = store.installed()
    done, errors, sent = threading.Event(), list[BaseException](), list[str]()

    def working(work: Callable[[int], None], rounds: int | None = None) -> threading.Thread:
        def run() -> None:
            number = 0
            try:
                while number != rounds and not done.is_set():
                    work(number)
                    number += 1
                    # lets the others run too
                    done.wait(0.002)
            except BaseException as error:
                errors.append(error)
                done.set()

        return threading.Thread(target=run)

    def dispatch(name: str) -> Callable[[int], None]:
        def work(number: int) -> None:
            ids = [f"{name}-{number}-{each}" for each in range(MESSAGES)]
            hook.send([DelayedMessage(destination="q", body=b"", due_at=utcnow(), message_id=each) for each in ids])
            transport = Transport()
            dispatcher = store.dispatcher(hook, transport)
            dispatcher.once()
            dispatcher.close()
            sent.extend(one.message_id for one in transport.sent)

        return work

    def cancel(number: int) -> None:
        later = utcnow() + timedelta(hours=1)
        hook.send([DelayedMessage(destination="q", body=b"", due_at=later, message_id=f"cancelled-{number}")])
        assert hook.cancel([f"cancelled-{number}"]).changed == 1

    dispatching = [working(dispatch(name), DISPATCHERS) for name in ("a", "b")]
    beside = [
        working(lambda _: [*hook.list(limit=10), hook.counts()]),
        working(cancel),
        # each connection in use is closed when it returns
        working(lambda _: hook.close()),
    ]
    for thread in (*dispatching, *beside):
        thread.start()
    for thread in dispatching:
        thread.join()
    done.set()
    for thread in beside:
        thread.join()
    assert errors == []
    # the last pass of one thread may have left messages to the other, which had ended
    last = Transport()
    store.dispatcher(hook, last).run()
    sent.extend(one.message_id for one in last.sent)
    assert sorted(sent) == sorted(
        f"{name}-{number}-{each}" for name in ("a", "b") for number in range(DISPATCHERS) for each in range(MESSAGES)
    )
