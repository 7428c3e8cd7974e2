"""The operators.

What a task sends again when it is retried, cleared or killed, and where that is decided. A place is a file of this
package, or below ``airflow_delayed/``, and names in it. Numbers are defaults. A message that comes *twice* has the same
id both times.

============================== ================================================== ======================================
situation                      what happens                                       where it is decided
============================== ================================================== ======================================
a task is retried              It goes on after its last checkpoint, kept every   sending.py: Sending._start,
                               2,500 messages: at most so many come twice at a    Sending._without_confirmed, CHUNK
                               broker. What a store knows is a duplicate, and is  task_state.py: TaskCheckpoints
                               not sent twice.                                    route.py: Route.leave_known
... without that checkpoint    All is sent from the top, and comes twice where it sending.py: Sending._start,
                               is as it was: rows or arguments have changed,      Sending.deliver, fingerprint
                               Airflow is older than 3.3, files have neither      task_state.py: TaskCheckpoints.get
                               times nor hashes.
... with rows of a query       They are read from the spool of the earlier try.   intake/spool.py: Spool.file
                               On another machine the query runs again: rows that
                               are as they were have the same ids, others are new send.py: _spool_of
                               messages.
the ids of a retry             They are the same: ``message_id``, a hash of       send_arguments.py:
                               ``id_columns``, or a hash of DAG, run, task, map   SendArguments.rules, origin_of
                               index and content, due time included.              identity.py: key_id, content_digest
the due times of a retry       Relative delays count from the first try, which    task_state.py: load_first_try,
                               the task's state and the store remember. If        FirstTry.anchor
                               neither does, as without a store before Airflow    message.py: due_after
                               3.3, or after a clear from 3.4 on, rows with such
                               delays are refused.
messages are not confirmed     The task fails with ``SendFailed``, and a retry    sending.py: Sending._send_all
                               sends that batch again, of up to 2,500 messages:   route.py: publish_and_record,
                               twice what was confirmed of it and is not recorded confirmed_messages
                               in a store.
a task is cleared              With ``same_ids`` it goes on if it had failed      task_state.py: _is_over, turn_of,
                               half-way, and sends all again if it had succeeded: note_success
                               twice at a broker, duplicates in a store. With     send_arguments.py:
                               ``new_ids`` it is another send, with delays from   SendArguments.new_ids
                               then on.
a worker is killed (SIGKILL)   Nothing is taken back, and a retry goes on as      sending.py: Sending._keep_checkpoint
                               above. Once all is confirmed and that is noted, it task_state.py: _is_over
                               sends nothing.
a task is marked failed        While it sends, it ends after the batch under way, send.py: DelayedSendOperator.on_kill
                               of up to 2,500 messages; what was confirmed or     sending.py: Sending._check_stopped
                               stored stays.
rows are rejected              Nothing is sent, and the task fails without a      sending.py: PreflightReport.judge
                               retry. With ``rejects`` they are written to that   send.py:
                               file, by each try, before the other rows are sent. DelayedSendOperator._preflight
                               What only the broker refuses, a body beyond its    intake/sources.py: Rejects
                               ``max_message_size``, joins them; without          sending.py: Sending._leave_out
                               ``rejects`` the task fails when the others are
                               sent. From there on no checkpoint is kept.
a Spark job is retried         All rows are sent again, twice at a broker, once   spark.py:
                               into a store; none after a try that had sent all.  DelayedSparkSendOperator.execute
a dispatch task is killed      At SIGTERM it finishes what is being sent and      dispatch.py:
                               releases the rest; for SIGKILL see                 StoreDispatchOperator.on_kill
                               ``store/dispatch/``. A retry fails too if an       task_state.py: first_dispatch
                               earlier try had given up messages.                 store/dispatch/dispatcher.py:
                                                                                  Dispatcher.take_up
============================== ================================================== ======================================
"""

from __future__ import annotations
