"""Amazon SQS: DelaySeconds up to 900 s, a delay FIFO beyond.

What happens when something is in the way of a message, and where that is decided. A place is a file of this package, or
below ``airflow_delayed/``, and names in it. Numbers are defaults. A message that comes *twice* has the same id both
times.

============================== ================================================== ======================================
situation                      what happens                                       where it is decided
============================== ================================================== ======================================
SQS throttles a request        botocore tries it 5 times, then each of its        client.py: retries, fault_of,
                               messages alone as often; then ``SendFailed`` names not_repeated
                               them. A dispatcher tries once, and keeps all       batch.py: BatchSender._request,
                               messages of that queue in the store, late; other   BatchSender.refuses
                               queues go on.
a batch fails in part          Only what was not confirmed is sent again after    batch.py: BatchSender.send_each,
                               0.2 to 0.8 s, 4 times in all; then ``SendFailed``  TRIES, MessageSender.send,
                               names it. A message that the answer does not name  MAX_FAILURES
                               may come twice. After 1,000 failures the rest is
                               not tried.
SQS cannot be reached          The send ends with ``TransportUnavailable``, which client.py: translated
                               counts what was confirmed; a retry may send that   batch.py: MessageSender._flush
                               twice.
due in over 900 s, no store    A task refuses the message before it sends any,    transport.py: SqsTransport.check,
                               unless the connection has ``unrestricted_delay``:  SqsTransport._allow_far,
                               then it goes through the delay queue, which must   SqsTransport._locate
                               be there, with the right settings.                 hops.py: hop_of
due in over 900 s, a store     The message waits in the store, and a dispatcher   transport.py: HORIZON
                               sends it 870 s before it is due at the earliest,   operators/send_arguments.py:
                               so never through the delay queue.                  CommonArguments.route
                                                                                  store/dispatch/dispatcher.py:
                                                                                  Dispatcher._window
a cycle stops                  Messages in the delay queue are late until a       delay_queue.py:
                               sensor runs again, and lost after 14 days without  DelayQueueLoop._check_age
                               one. If a message has waited for more than half of queues.py: DELAY_RETENTION
                               that, the next run sends it on, and fails without  sensors/fifo_cycle.py:
                               a retry.                                           FifoCycleSensor._go
a sensor is killed             What it had received is visible again after 30 s,  delay_queue.py: VISIBILITY,
                               late by that. What it had sent on and not deleted  DelayQueue._move, DelayQueue._delete
                               may come twice.
a message is not sent on       It stays in the delay queue, late, and is tried    delay_queue.py: DelayQueue._give_back,
                               again after 5 s, 10 s, ... 300 s. If SQS refuses   backoff_seconds, REFUSALS, _reject
                               the message itself, it goes to the error queue
                               after 10 receives; if it is unreadable, at once.
a destination is missing       A send ends with ``DestinationMissing``, or, if    transport.py: SqsTransport._locate,
                               others were sent before, goes on and names the     SqsTransport.cycle
                               messages in ``SendFailed``. A cycle serves the     delay_queue.py: DelayQueueLoop._round
                               other destinations and ends with
                               ``TopologyError``; the messages stay in the delay
                               queue.
a message expires              SQS gets no ``expires_at``: what was sent is       store/dispatch/attempt.py: decode_rows
                               delivered, and a store alone keeps an expired      stats.py: expiry_risk
                               message back. What nobody reads is lost after the  settings.py: compare_destination
                               destination's retention, counted from the send;
                               ``verify`` warns.
============================== ================================================== ======================================
"""

from __future__ import annotations
