"""The dispatcher: it claims due messages from the store, sends them, and settles what became of them.

What happens when something is in its way, and where that is decided. A place is a file of this package, or below
``airflow_delayed/``, and names in it. Numbers are defaults. A message that comes *twice* has the same id both times. No
message of this table is lost.

============================== ================================================== ======================================
situation                      what happens                                       where it is decided
============================== ================================================== ======================================
a broker is away               All its messages stay in the store, late, with no  attempt.py: _part, decide
                               try counted. The connection is tried again after   worker.py: ConnectionWorker._run
                               pauses of up to 5 s; after 30 s a run goes on      limits.py: Breaker
                               without it and fails, the service goes on with it. dispatcher.py: Dispatcher._renews
                               What was sent without a confirm may come twice.
a destination refuses (full)   All its messages wait in the store, late, with no  worker.py: _Resting.note
                               try counted; 10 are tried again after 1 s, at last turns.py: ClaimTurns.resting, TRIED,
                               every 10 s (60 s if hundreds of destinations       ClaimRound.served
                               refuse). Others go on, except in the levels of     attempt.py: decide
                               ``rabbitmq/``.
a destination hangs            To a dispatcher that stays, a queue of RabbitMQ    dispatcher.py: Dispatcher._transport
                               that confirms nothing for 1 s refuses. Others wait worker.py: SILENCE, _Resting.note
                               as long for each try; its messages may come twice.
                               A run that does not stay waits as for a broker
                               that is away.
one message is refused         It is tried again 7 times, after 1 s, 2 s, 4 s,    attempt.py: decide, FIRST_RETRY,
                               ... 64 s, less up to half by chance; then it is    LONGEST_RETRY
                               given up. In a queue table a constraint, a         clock.py: next_sleep
                               trigger, an encoding or a length refuses it, and   queue_tables.py:
                               the rows beside it are delivered; any other error  QueueTables._deliver_to
                               is the table's, as if it were full.                store/engine.py: refuses_row
                                                                                  store/policy.py:
                                                                                  DispatchPolicy.number_of_retries
a message cannot be sent       It is given up at once, and others go on: its row  attempt.py: decode_rows, _Feed, _close
                               is unreadable, its body over 128 MiB, its headers  store/records.py: to_message
                               over 16 MiB, it is beyond a limit of the           store/policy.py:
                               transport, or its destination is missing or not    DispatchPolicy.refused
                               allowed.
a message expires              It is not sent, and moves to the failed messages;  attempt.py: decode_rows, _Feed
                               no run fails for it.                               settle.py: EXPIRED
a message is given up          A copy goes to the error destination, over the     attempt.py: error_copies, dead_letter
                               same connection. Without one, or if that refuses,  limits.py: RateBreaker
                               the message moves to the failed messages, and the  dispatcher.py: Dispatcher.check
                               run fails at its end; more than 30 refused copies
                               in 30 s end it at once.
a dispatcher is killed         Its leases end within 30 s, and others claim its   store/policy.py:
                               messages, late by that. What it had sent and not   DispatchPolicy.claim_timeout
                               settled comes twice, in a queue table never.       renewal.py: LeaseRenewer
                                                                                  worker.py: QueueTableWorker._move
a dispatcher stands still      When it goes on, it sends nothing of a batch with  worker.py: _LeaseGuard.may_send,
                               less than a sixth of its lease, and settles only   MARGIN
                               what it still leases. What it had sent comes twice repository.py:
                               if others claimed it meanwhile.                    DispatchRepository._settle_then_claim
the database is away           Claims and outcomes are tried again after pauses   repository.py:
                               of up to 5 s; after 30 s a run fails, and the      DispatchRepository._persist
                               service begins again. A call without an answer is  limits.py: Activity.limit
                               cut off after 30 s. Due messages are late; what    store/engine.py: Watchdog
                               was sent and not settled when its lease ends comes cli/service.py: ConnectionLoop
                               twice.
a commit is in doubt           Outcomes are written again, but only of messages   repository.py:
                               that it still leases and nobody has changed, so    DispatchRepository._transact
                               none counts twice. Messages of a claim without an  store/remembered_ids.py: still_claimed
                               answer are free after 30 s, late by that.
messages are paused            From the next claim on, within 2 s, none is taken  store/pauses.py: PauseReader,
                               any more: late by the pause, and sent at once when not_paused
                               somebody ends it. What was claimed before, and     turns.py: ClaimTurns.pausing
                               what a broker has, arrives.
the last dispatcher ends       It releases what it has not begun to send. What    dispatcher.py: Dispatcher.stop,
                               falls due is late until the next one begins.       Dispatcher._window
============================== ================================================== ======================================
"""

from __future__ import annotations

import airflow_delayed.store.alchemy  # noqa: F401
