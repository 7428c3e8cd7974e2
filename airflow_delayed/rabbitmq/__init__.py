"""RabbitMQ: topologies of delay levels.

What a send does when something is in its way, and where that is decided. A place is a file of this package, or below
``airflow_delayed/``, and names in it. Numbers are defaults. A message that comes *twice* has the same id both times. A
message that ``SendFailed`` names is not confirmed, and may arrive all the same if it was published.

============================== ================================================== ======================================
situation                      what happens                                       where it is decided
============================== ================================================== ======================================
no host answers at first       Each host is tried once, then the send ends with   publisher.py: Publisher.send
                               ``TransportUnavailable``; nothing was sent.        connection.py: CONNECTION_TIMEOUT
the connection is lost         What is unconfirmed, 1,000 messages at most, goes  session.py: Session.run
                               to the next host, and may come twice. After eight  publisher.py: Publisher.send,
                               rounds of tries, with pauses of 41.5 s in all and  RECONNECT_WAITS, WINDOW
                               no confirm, ``SendFailed`` names it.
returned: there is no queue    The send takes no more messages, finishes what is  session.py: Session._on_return,
                               published, and names the message in                Session._settle
                               ``SendFailed``.                                    backlog.py: Backlog.fail
a body is too large            The broker closes the channel, and names no        session.py: Session._pump,
                               message. So a body that is larger than all before  Session._leave_out_refused
                               it is published by itself, and ``SendFailed``      backlog.py: BodySizes, SURE_BYTES
                               names it; others are sent once. Of bodies up to
                               1 KiB what is unconfirmed then may come twice.
a full queue refuses (nack)    A message that is due is sent again after 0.5 to 4 session.py: Session._settle,
                               s, for 60 s (``confirm_timeout``), while others go Session._send_again
                               on; then ``SendFailed`` names it. A dispatcher     delivery.py: Delivery.patient
                               gives it up at once, and keeps it in the store.
                               What a full level refuses, both send again.
full when a message falls due  If the queue rejects, the message waits at the     topology.py: Topology.queue_arguments,
                               head of its level, and all behind it wait,         Topology.quorum
                               whatever their destination: late until the queue   verify.py: receivers, stuck
                               takes it. In classic levels (``nservicebus-v1``)   operators/reporting.py: require_ready
                               it is lost. ``verify`` warns; a send goes on.
a quorum queue hangs           From a dispatcher that stays it gets at most 30    backlog.py: DestinationWindows, FEW
                               messages at first, which are given up after 1 s    session.py: Session._introduce,
                               and may come twice; other queues go on. Any other  Session._give_up_silent
                               send waits until no queue has confirmed anything   confirm_timer.py: SilenceWatch
                               for 60 s.
a node hangs                   After 5 s without a confirm the send asks all      session.py: Session._why_silent
                               hosts. If its own takes no login and another does, cluster.py: SilenceCheck,
                               what is unconfirmed goes there, and may come       HostAnswers.only_others
                               twice.
levels lose their quorum       The send ends 10 to 15 s after the last confirm,   cluster.py: HostAnswers.quorum_lost
                               and names the cause; to a dispatcher that is a     publisher.py: Publisher._final
                               broker that is away.
a broker is silent             Of two hosts the next is tried after 30 s, of more confirm_timer.py: ConfirmTimer
                               after 20 s. After 60 s without a confirm           publisher.py: Publisher._no_confirm
                               (``confirm_timeout``) the send ends with
                               ``SendFailed``, or with ``TransportUnavailable``
                               if nothing was sent.
an alarm blocks the broker     The send waits, up to 300 s (``blocked_timeout``), session.py: Session._on_blocked
                               and its other clocks stand still; then it ends,    publisher.py: Publisher._final
                               and tries no other host.
a level is missing at the send Without its exchange the send ends with            session.py:
                               ``TopologyError``, or with ``SendFailed`` if       Session._on_channel_closed,
                               messages were sent before; without its queue the   _why_returned
                               broker returns the message.                        declare.py: refusal_cause
... or missing when it is due  A message that finds no level, binding or          topology.py: Topology.unroutable_queue
                               destination goes to the queue of unroutable        declare.py: plan
                               messages, late until ``redrive()`` sends it on. On verify.py: unroutable
                               a topology that others declare too it waits at the transport.py:
                               head of its level, and all behind it wait, unless  RabbitMQTransport.redrive
                               an install has set the policy.
============================== ================================================== ======================================
"""

from __future__ import annotations
