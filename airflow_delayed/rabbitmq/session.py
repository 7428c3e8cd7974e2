"""One connection of a send: it publishes a window of messages, takes confirms, and sends refused messages again.

:class:`~airflow_delayed.rabbitmq.publisher.Publisher` opens a session for each connection that a send needs, one after
another. All of it runs in the caller's thread.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from pika.exceptions import AMQPError, ChannelClosedByBroker, ChannelWrongStateError, ConnectionWrongStateError

from airflow_delayed.clock import next_sleep
from airflow_delayed.delivery import Clock
from airflow_delayed.errors import DelayedError, some
from airflow_delayed.message import delay_seconds
from airflow_delayed.rabbitmq.backlog import Backlog, BodySizes, DestinationWindows, Entry, Unconfirmed
from airflow_delayed.rabbitmq.cluster import SilenceCheck
from airflow_delayed.rabbitmq.confirm_timer import (
    ALL_SILENT,
    FIRST_WARNING,
    ConfirmTimeout,
    ConfirmTimer,
    QuorumLost,
    SilenceWatch,
    SilentDestination,
)
from airflow_delayed.rabbitmq.connection import host_name
from airflow_delayed.rabbitmq.declare import PRECONDITION_FAILED, refusal_cause
from airflow_delayed.rabbitmq.destinations import SessionDestinations
from airflow_delayed.rabbitmq.properties import DESTINATION, MessagePropertiesWriter, PropertiesWriter
from airflow_delayed.rabbitmq.topology import PublishAddress, Topology, check_headers
from airflow_delayed.rabbitmq.wire import DecodingSelectConnection, WriteMessage, buffered_services, message_writer

if TYPE_CHECKING:
    from pika import BasicProperties
    from pika.channel import Channel
    from pika.connection import Connection, Parameters
    from pika.frame import Method
    from pika.spec import Basic
    from pika.spec import Connection as Methods

log = logging.getLogger(__name__)

#: Seconds before a message that the broker refuses (basic.nack) is sent again, at first and at most: a queue, of a
#: level or of the destination, is full or has no leader.
_FIRST_SLEEP, _LONGEST_SLEEP = 0.5, 4.0
_CLOSE_SECONDS = 5.0
#: A source is slow if a turn takes longer than the first, and also longer than the second for each of its messages.
_TURN_SECONDS, _MESSAGE_SECONDS = 0.002, 0.0001
#: How many destinations are introduced at a time; each needs a channel, of 2,047 that a broker allows by default.
_INTRODUCED = 500
#: How many addresses are kept: many messages of a batch have the same destination and second.
_ADDRESSES = 5000
_SILENT = "Have queues lost their quorum, or is the host frozen?"
_SLOW = "it has confirmed nothing for"
_REFUSED = "Is a queue full, or without a leader?"


class Session:
    """Sends a backlog over one connection until the backlog is done or the connection is lost.

    A message that the broker refuses (nack) is sent again here, on the same connection, for ``confirm_timeout``; the
    others go on meanwhile, as long as fewer than a window of messages are refused. After a lost connection :meth:`run`
    puts the unconfirmed messages back, and the publisher sends them in the next session; the time for which a message
    has been refused goes on.

    A broker closes the channel for a message that it refuses for good, and does not name it. A body of unknown fate is
    therefore published by itself; whatever else is refused so is found by publishing one message at a time.

    :param hosts: all hosts of the connection, to ask them why no confirm comes.
    :param sizes: of the bodies that the broker takes.
    :param keep: keep the connection when the backlog is done, for :meth:`again`; the caller closes it in the end.
    :param patient: False: give up at once what a destination refuses; what a level refuses is sent again all the same.
    :param silence: seconds after which a destination that confirms nothing is given up; None: only the whole send is.
    """

    def __init__(
        self,
        parameters: Parameters,
        backlog: Backlog,
        *,
        hosts: Sequence[Parameters],
        topology: Topology,
        clock: Clock,
        window: int,
        sizes: BodySizes,
        writer: PropertiesWriter | None = None,
        keep: bool = False,
        patient: bool = True,
        silence: float | None = None,
    ) -> None:
        self.opened = False
        #: The broker's reason why it takes no messages, from the start of its alarm to the end.
        self.blocked: str | None = None
        self._topology = topology
        self._writer = writer or MessagePropertiesWriter(topology.headers)
        self._backlog = backlog
        self._clock = clock
        self._most_unconfirmed = self._window = window
        self._sizes = sizes
        #: Whether the unconfirmed message is larger than the bodies that the broker surely takes.
        self._probes = False
        self._keep = keep
        self._patient = patient
        self._silence = silence
        self._watch: SilenceWatch | None = None
        self._windows = None if silence is None else DestinationWindows()
        #: By destination that is not known yet, its first message, which was sent over a channel of its own.
        self._introduced: dict[str, Entry] = {}
        #: How many of these messages were answered, and how many were given up, whose channels the broker may block.
        self._introductions = self._blocked_channels = 0
        self._unconfirmed = Unconfirmed()
        self._waiting: Entry | None = None
        #: Messages that the broker refused, until they are sent again; the others go on meanwhile.
        self._refused: list[Entry] = []
        self._addresses: dict[tuple[str, int], PublishAddress] = {}
        self._paused = True
        #: Whether the channels are open, and the user's rights known.
        self._ready = False
        self._yields = False
        self._finished = False
        #: No more messages are taken; the written messages still have to be confirmed.
        self._stopped = False
        #: Why the connection ended; None while it is open, and when the backlog is done.
        self._reason: BaseException | None = None
        self._channel: Channel
        self._frame_max: int
        self._write: WriteMessage
        self._services = buffered_services()
        self._host = host_name(parameters)
        self._check = SilenceCheck(hosts)
        self._opened_at = 0.0
        self._timer: ConfirmTimer
        self._connection = DecodingSelectConnection(
            parameters,
            on_open_callback=self._on_open,
            on_open_error_callback=self._on_connection_closed,
            on_close_callback=self._on_connection_closed,
            custom_ioloop=self._services,
        )
        self._loop = self._connection.ioloop
        self._destinations = SessionDestinations(
            self._connection, topology, on_ready=self._on_ready, on_failed=self._on_not_bound
        )

    def run(self, timer: ConfirmTimer) -> BaseException | None:
        """Send the backlog; return None when it is done, else why the connection ended.

        Unconfirmed messages are put back into the backlog.

        :param timer: ends the session with a ConfirmTimeout when the broker confirms nothing for too long.
        """
        self._timer = timer
        timer.connect(self._unconfirmed.settled + self._introductions)
        if self._silence is not None:
            # the silence of all must end before a host's share of the timeout
            most = timer.host_timeout / (2 * ALL_SILENT)
            self._watch = SilenceWatch(min(self._silence, most), timer.interval)
        self._look = self._loop.call_later(timer.interval, self._look_at_timer)
        try:
            self._loop.start()
        finally:
            self._loop.remove_timeout(self._look)
            if not self.kept:
                self._shut()
            waiting = [self._waiting] if self._waiting else []
            held = self._windows.take_out() if self._windows is not None and self._windows.held else []
            self._backlog.put_back([*self._unconfirmed, *self._refused, *waiting, *self._introduced.values(), *held])
            self._introduced.clear()
            self._refused.clear()
        return self._reason

    @property
    def kept(self) -> bool:
        """Whether the backlog is done and the connection stays open for another."""
        return self._keep and self._finished and self._connection.is_open and self._channel.is_open

    def again(self, backlog: Backlog) -> None:
        """Take another backlog, which :meth:`run` then sends over the same connection."""
        self._backlog = backlog
        self._finished = False
        self._loop.call_later(0, self._resume)

    def service(self, seconds: float) -> bool:
        """Answer heartbeats on a connection that was kept, and return whether the broker answers in so many seconds.

        If not, the connection is closed. Of destinations nothing is known afterwards, for their queues may change until
        the next backlog.
        """
        answers: list[object] = []

        def answered(frame: object) -> None:
            answers.append(frame)
            self._loop.stop()

        if self.kept:
            # a broker in alarm reads nothing, and is not away
            asks = self.blocked is None
            if asks:
                # for a channel without consumers it changes nothing
                self._channel.basic_qos(callback=answered)
            over = self._loop.call_later(seconds if asks else 0, self._loop.stop)
            self._loop.start()
            self._loop.remove_timeout(over)
        if self.kept and (answers or self.blocked is not None):
            self._destinations.direct.clear()
            self._addresses.clear()
            if self._windows is not None:
                self._windows = DestinationWindows()
            return True
        with contextlib.suppress(Exception):
            self._keep = False
            if not self._connection.is_closed:
                self._end(ConfirmTimeout(f"no answer within {seconds:g} s"))
                self._loop.start()
        self._loop.close()
        return False

    def close(self) -> None:
        """Close a connection that was kept."""
        with contextlib.suppress(Exception):
            self._keep = False
            if not self._connection.is_closed:
                self._finish()
                self._loop.start()
        self._loop.close()

    # opening and closing

    def _on_open(self, connection: Connection) -> None:
        self.opened = True
        self._opened_at = self._timer.elapsed
        connection.add_on_connection_blocked_callback(self._on_blocked)
        connection.add_on_connection_unblocked_callback(self._on_unblocked)
        self._open_channel(lambda _: self._destinations.open(self._resume))

    def _open_channel(self, ready: Callable[[object], None]) -> None:
        def opened(channel: Channel) -> None:
            self._channel = channel
            self._frame_max = self._connection.params.frame_max
            self._write = message_writer(channel, self._services, self._frame_max)
            channel.add_on_close_callback(self._on_channel_closed)
            channel.add_on_return_callback(self._on_return)
            channel.confirm_delivery(self._on_confirm, callback=ready)

        self._connection.channel(on_open_callback=opened)

    def _on_connection_closed(self, _: Connection, reason: BaseException | str) -> None:
        if not self._finished and self._reason is None:
            self._reason = reason if isinstance(reason, BaseException) else ConnectionError(reason)
        self._loop.stop()

    def _finish(self) -> None:
        self._finished = True
        if self.kept:
            self._loop.stop()
            return
        if self._connection.is_open:
            self._connection.close()
        # a broker that takes no messages reads no farewell either, and a broker that has blocked a channel answers none
        patient = self.blocked is None and not self._blocked_channels
        self._loop.call_later(_CLOSE_SECONDS if patient else 0, self._hang_up)

    def _hang_up(self) -> None:
        if self._services is not None and self._services.connected:
            self._services.hang_up()
        else:
            self._loop.stop()

    def _shut(self) -> None:
        """After an interrupt, wait a while for confirms of written messages; then close the connection and the loop."""
        with contextlib.suppress(Exception):
            if not self._connection.is_closed:
                self._stopped = True
                self._resume()
                wait = _CLOSE_SECONDS if self.blocked is None else 0
                self._loop.call_later(wait, self._finish)
                self._loop.call_later(wait + _CLOSE_SECONDS + 1, self._loop.stop)
                self._loop.start()
        self._loop.close()

    # alarms

    def _on_blocked(self, _: Connection, frame: Method[Methods.Blocked]) -> None:
        self.blocked = frame.method.reason
        log.warning(
            "Connection %r: the broker takes no messages, since it is %s; sending goes on when its alarm ends",
            self._backlog.conn_id,
            self.blocked,
        )

    def _on_unblocked(self, _: Connection, __: Method[Methods.Unblocked]) -> None:
        log.warning("Connection %r: the broker's alarm has ended; sending goes on", self._backlog.conn_id)
        self.blocked = None
        self._pump()

    # confirms that do not come

    def _look_at_timer(self) -> None:
        """Warn while the broker confirms nothing, or refuses a message; end the connection when it answers nothing."""
        timer = self._timer
        awaits = bool(self._unconfirmed or self._introduced) or self._waiting is not None or not self._ready
        answers = self._unconfirmed.settled + self._introductions
        timer.advance(answers, awaits=awaits, blocked=self.blocked is not None)
        if self._watch is not None and self._give_up_silent(self._watch):
            return
        # pika's own timeout ends a connection that does not open
        if timer.host_over and self._connection.is_open:
            self._end(ConfirmTimeout(f"no confirm for {timer.silent:.0f} s, while {self._awaited()}"))
            return
        refused = self._backlog.refused
        seconds = timer.elapsed - next(iter(refused.values())) if refused else timer.silent
        if timer.warns(seconds):
            # a host that refuses answers after each pause
            if refused and timer.silent < FIRST_WARNING / 2:
                problem = (
                    f"refuses {len(refused):,} messages, the first for {seconds:.0f} s: {_targets(refused)}. {_REFUSED}"
                )
            else:
                problem = f"has confirmed nothing for {timer.silent:.0f} s, while {self._awaited()}. {_SILENT}"
            log.warning(
                "Connection %r: %s %s 'airflow delayed doctor' shows it. Sending ends after %g s (confirm_timeout)",
                self._backlog.conn_id,
                self._host,
                problem,
                timer.timeout,
            )
        if self._connection.is_open and self.blocked is None and (why := self._why_silent(seconds)):
            self._end(why)
            return
        self._look = self._loop.call_later(timer.interval, self._look_at_timer)

    def _give_up_silent(self, watch: SilenceWatch) -> bool:
        """Give up messages of destinations that confirm nothing; return whether the connection ends for it."""
        silent, blocking = watch.look(self._unconfirmed, self._introduced, blocked=self.blocked is not None)
        if not silent:
            return False
        introduced = [self._introduced.pop(name) for name in silent if name in self._introduced]
        self._blocked_channels += len(introduced)
        entries = [*self._unconfirmed.take_out(silent), *introduced]
        if self._windows is not None:
            entries += self._windows.take_out(silent)
        for name in silent:
            # its next message is sent over a channel of its own again
            self._destinations.direct.pop(name, None)
        for entry in entries:
            self._backlog.refuse(entry, f"{_SLOW} {watch.seconds:g} s.")
        if (blocking or self._blocked_channels > _INTRODUCED) and self._connection.is_open:
            self._end(SilentDestination())
            return True
        self._pump()
        return False

    def _why_silent(self, seconds: float) -> ConfirmTimeout | None:
        """Return why to end a connection that has confirmed nothing for some seconds; None to go on."""
        timer, refused = self._timer, self._backlog.refused
        answers = self._check.look(seconds, timer.elapsed - self._opened_at, timer.timeout)
        if answers is None:
            return None
        what = f"{len(refused):,} messages are refused" if refused else self._awaited()
        problem = f"no confirm for {seconds:.0f} s, while {what}"
        queues = self._topology.level_names()
        if seconds >= timer.patience and (lost := answers.quorum_lost(self._host, queues)):
            log.warning("Connection %r: %s: %s; %s. Sending ends", self._backlog.conn_id, self._host, problem, lost)
            return QuorumLost(f"{problem}; {lost}")
        if not refused and answers.only_others(self._host):
            return ConfirmTimeout(f"{problem}; it takes no login any more, and other hosts do")
        return None

    def _end(self, reason: ConfirmTimeout | SilentDestination) -> None:
        self._reason = reason
        self._paused = True
        self._connection.close()
        # it would not answer a farewell either
        self._loop.call_later(0, self._hang_up)

    def _awaited(self) -> str:
        """Describe what the broker has not answered."""
        if self._unconfirmed:
            return f"{len(self._unconfirmed):,} messages are unconfirmed: {_targets(self._unconfirmed)}"
        if self._waiting is not None:
            return f"destination {self._waiting.message.destination!r} is being bound"
        if self._introduced:
            return f"{len(self._introduced):,} destinations have not confirmed their first message"
        return "the connection is being opened"

    # publishing

    def _resume(self) -> None:
        self._ready = True
        self._paused = self._finished
        self._pump()

    def _pump(self, *, one: bool = False) -> None:
        """Publish until the window is full, or the backlog empty, or a destination has to be made ready first.

        Or until the source is slow: its messages are written before it is asked for more.

        :param one: treat the source as slow after one message.
        """
        if self._yields:
            return
        began = time.monotonic()
        before = self._unconfirmed.last
        while self._waiting is None and self._has_room:
            if self._paused or self.blocked is not None:
                return
            entry = None if self._stopped else self._backlog.take()
            if entry is None:
                if not self._unconfirmed and not self._refused and not self._introduced:
                    self._paused = True
                    self._finish()
                return
            try:
                if self._waits_to_go_alone(entry):
                    self._backlog.put_back([entry])
                    return
                self._publish_or_prepare(entry)
            except DelayedError as error:
                self._backlog.fail(entry, error)
            except (ChannelWrongStateError, ConnectionWrongStateError):
                # the channel or the connection is being closed; a callback reports that
                self._backlog.put_back([entry])
                return
            except AMQPError as error:
                self._backlog.fail(entry, _unwritable(error))
            enough = max(_TURN_SECONDS, _MESSAGE_SECONDS * (self._unconfirmed.last - before))
            if one or time.monotonic() - began > enough:
                self._yields = True
                # two timers in a row: the second fires in the next turn of the loop, after the socket was served
                self._loop.call_later(0, lambda: self._loop.call_later(0, self._go_on))
                return

    def _waits_to_go_alone(self, entry: Entry) -> bool:
        """Return whether the broker may refuse a body, and other messages are unconfirmed, which a refusal would lose.

        :raises LimitExceeded: the broker has named its limit, and the body is larger.
        """
        body = entry.message.body
        if len(body) <= self._sizes.accepted:
            return False
        if refusal := self._sizes.refusal(body):
            raise refusal
        return bool(self._unconfirmed)

    def _publish_or_prepare(self, entry: Entry) -> None:
        if self._windows is not None:
            self._publish_within(self._windows, entry)
        elif entry.message.destination in self._destinations.direct:
            self._publish(entry)
        else:
            self._destinations.prepare(entry.message.destination)
            self._waiting = entry

    @property
    def _has_room(self) -> bool:
        if self._probes and self._unconfirmed:
            return False
        taken = len(self._unconfirmed) + len(self._refused)
        if self._windows is not None:
            if len(self._introduced) >= _INTRODUCED:
                return False
            taken += self._windows.held + len(self._introduced)
        return taken < self._window

    def _publish_within(self, windows: DestinationWindows, entry: Entry) -> None:
        """Publish a message, or hold it while its destination has not confirmed others."""
        name = entry.message.destination
        if name in self._introduced:
            windows.hold(entry)
        elif name not in self._destinations.direct:
            self._introduce(windows, entry)
        elif windows.allows(entry):
            self._publish(entry)
            windows.add(entry)

    def _introduce(self, windows: DestinationWindows, entry: Entry) -> None:
        """Bind a destination, and send it its first message over a channel of its own.

        A broker does nothing more for a channel until a quorum queue that hangs has answered its first message.
        """
        name = entry.message.destination
        self._introduced[name] = entry
        returned: list[str] = []

        def bound(channel: Channel) -> None:
            channel.add_on_return_callback(lambda *frames: returned.append(_why_returned(*frames[1:3])))
            channel.confirm_delivery(lambda frame: answered(channel, frame), callback=lambda _: publish(channel))

        def publish(channel: Channel) -> None:
            try:
                self._publish_on(channel, message_writer(channel, self._services, self._frame_max), entry)
            except (DelayedError, AMQPError) as error:
                if self._await_no_longer(entry):
                    self._backlog.fail(entry, _unwritable(error))
                    go_on(channel)

        def answered(channel: Channel, frame: Method[Basic.Ack | Basic.Nack]) -> None:
            if self._await_no_longer(entry):
                self._settle(entry, frame.method.NAME == "Basic.Nack", returned[0] if returned else None)
                go_on(channel)

        def go_on(channel: Channel) -> None:
            channel.close()
            self._backlog.put_back(windows.take_out([name]))
            self._pump()

        def closed(_: Channel, reason: Exception) -> None:
            if isinstance(reason, ChannelClosedByBroker) and self._await_no_longer(entry):
                cause = refusal_cause(self._backlog.conn_id, self._topology, reason, name)
                held = windows.take_out([name])
                if reason.reply_code == PRECONDITION_FAILED and name in self._destinations.direct:
                    # it is bound, so this message alone is refused
                    self._fail_refused(entry, reason)
                    self._backlog.put_back(held)
                else:
                    for one in [entry, *held]:
                        self._backlog.fail(one, cause)
                self._pump()

        self._destinations.introduce(name, bound, closed)

    def _await_no_longer(self, entry: Entry) -> bool:
        """Note that a destination's first message was answered; return False if it was given up before."""
        if self._introduced.get(entry.message.destination) is not entry:
            return False
        del self._introduced[entry.message.destination]
        self._introductions += 1
        return True

    def _go_on(self) -> None:
        self._yields = False
        self._pump()

    def _publish(self, entry: Entry) -> None:
        self._publish_on(self._channel, self._write, entry)
        self._unconfirmed.add(entry)
        self._probes = len(entry.message.body) > self._sizes.accepted

    def _publish_on(self, channel: Channel, write: WriteMessage, entry: Entry) -> None:
        message, now = entry.message, self._clock()
        delay = delay_seconds(message.due_at, now)
        check_headers(message, self._topology.headers, delay)
        address = self._address(message.destination, delay)
        sent = self._writer.properties(message, now, delay, address.level)
        if not channel.is_open:
            raise ChannelWrongStateError("the channel is closed")
        write(address.exchange, address.key, message.body, sent)
        entry.address, entry.at_once = address, delay <= 0
        self._backlog.published = True

    def _address(self, destination: str, delay: int) -> PublishAddress:
        known = self._addresses.get((destination, delay))
        if known is None:
            known = self._topology.address(
                destination,
                delay,
                default_exchange=self._destinations.default_exchange,
                direct=self._destinations.direct[destination],
            )
            if len(self._addresses) >= _ADDRESSES:
                self._addresses.clear()
            self._addresses[destination, delay] = known
        return known

    def _on_return(self, _: Channel, method: Basic.Return, sent: BasicProperties, __: bytes) -> None:
        self._unconfirmed.returned(sent.message_id or "", _why_returned(method, sent))

    def _on_confirm(self, frame: Method[Basic.Ack | Basic.Nack]) -> None:
        method = frame.method
        refused = method.NAME == "Basic.Nack"
        for entry, returned in self._unconfirmed.settle(method.delivery_tag, method.multiple):
            if self._windows is not None:
                self._backlog.put_back(self._windows.answered(entry))
            if self._probes:
                self._sizes.accepted, self._probes = len(entry.message.body), False
            self._settle(entry, refused, returned)
        self._pump()

    def _settle(self, entry: Entry, refused: bool, returned: str | None) -> None:
        if self._watch is not None:
            self._watch.answered(entry.message.destination)
        if refused and entry.at_once and entry.address and not self._patient:
            self._backlog.refuse(entry, f"{entry.address.target} refuses messages at present. {_REFUSED}")
        elif refused:
            self._send_again(entry)
        elif returned:
            self._backlog.fail(entry, returned)
        else:
            self._backlog.confirm(entry)

    def _send_again(self, entry: Entry) -> None:
        """Send a message again that the broker refused (nack), after a growing pause, until confirm_timeout is over."""
        entry.refusals += 1
        timer = self._timer
        # the host may have been silent before it refused
        seconds = timer.elapsed - self._backlog.refused.setdefault(entry, timer.elapsed - timer.silent)
        pause = next_sleep(entry.refusals, first=_FIRST_SLEEP, longest=_LONGEST_SLEEP)
        if seconds + pause >= timer.timeout:
            times = f"{entry.refusals:,} times in {seconds:.0f} s (confirm_timeout {timer.timeout:g} s)"
            self._backlog.fail(entry, f"refused by the broker {times}. {_REFUSED}")
            return
        if not self._refused:
            self._loop.call_later(pause, self._refused_again)
        self._refused.append(entry)

    def _refused_again(self) -> None:
        self._backlog.put_back(self._refused)
        self._refused.clear()
        self._pump()

    def _on_channel_closed(self, _: Channel, reason: Exception) -> None:
        if not isinstance(reason, ChannelClosedByBroker):
            return
        if reason.reply_code == PRECONDITION_FAILED and self._unconfirmed:
            self._leave_out_refused(reason)
            return
        # it refuses all that is published so
        cause = refusal_cause(self._backlog.conn_id, self._topology, reason)
        held = [] if self._windows is None else self._windows.take_out()
        for entry in [*self._unconfirmed.clear(), *self._introduced.values(), *held]:
            self._backlog.fail(entry, cause)
        self._introduced.clear()
        if self._waiting:
            self._backlog.fail(self._waiting, cause)
            self._waiting = None
        self._backlog.put_back(self._refused)
        self._refused.clear()
        self._backlog.give_up(cause)
        self._paused = True
        self._finish()

    def _leave_out_refused(self, reason: ChannelClosedByBroker) -> None:
        """Fail the message for which the broker closed the channel, and go on with the others on a new one."""
        entries = self._unconfirmed.clear()
        self._sizes.note_refusal(reason.reply_text)
        guilty = [one for one in entries if len(entries) == 1 or self._sizes.refusal(one.message.body)]
        for entry in guilty:
            self._fail_refused(entry, reason)
        # as long as it is not found, messages go one at a time
        self._window = self._most_unconfirmed if guilty else 1
        if self._windows is not None:
            self._backlog.put_back(self._windows.take_out())
        self._backlog.put_back(entry for entry in entries if entry not in guilty)
        self._paused = True
        self._open_channel(lambda _: self._resume())

    def _fail_refused(self, entry: Entry, reason: ChannelClosedByBroker) -> None:
        self._sizes.note_refusal(reason.reply_text)
        cause = self._sizes.refusal(entry.message.body)
        self._backlog.fail(entry, cause or refusal_cause(self._backlog.conn_id, self._topology, reason))

    # destinations

    def _on_ready(self) -> None:
        if self._waiting is None:
            return
        entry, self._waiting = self._waiting, None
        self._backlog.put_back([entry])
        # write it at once: the source may take long until it has the next message
        self._pump(one=True)

    def _on_not_bound(self, reason: ChannelClosedByBroker) -> None:
        if self._waiting is not None:
            entry, self._waiting = self._waiting, None
            cause = refusal_cause(self._backlog.conn_id, self._topology, reason, entry.message.destination)
            self._backlog.fail(entry, cause)
        # also if the broker closed the channel by itself: a message may have come before there was another channel
        self._pump()


def _unwritable(error: DelayedError | AMQPError) -> DelayedError | str:
    return error if isinstance(error, DelayedError) else f"not to be written as AMQP: {type(error).__name__}"


def _why_returned(method: Basic.Return, sent: BasicProperties) -> str:
    if method.exchange:
        where = f"through exchange {method.exchange!r}"
    elif method.routing_key == (sent.headers or {}).get(DESTINATION):
        where = "queue is gone"
    else:
        where = "a delay level's queue is gone; TopologyInstallOperator makes it again"
    return f"returned by the broker as {method.reply_text} ({where})"


def _targets(entries: Iterable[Entry]) -> str:
    """Count messages by the queue or exchange to which they were published."""
    counts = Counter(entry.address.target for entry in entries if entry.address)
    return some([f"{count:,} in {target}" for target, count in counts.most_common()], separator=", ")
