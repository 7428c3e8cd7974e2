"""``@task.delayed_send``: what a function returns or yields becomes messages that arrive at their due time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.providers.common.compat.sdk import DecoratedOperator, determine_kwargs, task_decorator_factory

from airflow_delayed.errors import SourceError
from airflow_delayed.intake.spool import SpooledSource
from airflow_delayed.message import DelayedMessage
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.sources.templated import TemplatedSource

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.bases.decorator import TaskDecorator

    from airflow_delayed.intake.columns import ColumnRules
    from airflow_delayed.intake.sources import Source
    from airflow_delayed.intake.spool import Spool

#: Parameters of the operator that say what to send, as the function does here.
_CONTENT = ("messages", "source", "value", "message_id")


class FunctionSource(TemplatedSource):
    """The messages of a function, which runs once in a try.

    :param call: runs it; None until its task does.
    """

    def __init__(self, name: str, call: Callable[[], Any] | None = None) -> None:
        self._name = name
        self._call = call

    def open(self, spool: Spool, *, naive_ok: bool) -> Source:
        """Return the messages."""
        return SpooledSource(f"function {self._name}", b"", self._entries, spool)

    def _entries(self, wanted: ColumnRules) -> Iterator[object]:
        assert self._call is not None
        entries = self._call()
        if isinstance(entries, str | bytes | Mapping | DelayedMessage) or not isinstance(entries, Iterable):
            raise SourceError(
                f"function {self._name} must return a list of messages, or yield them, and returned"
                f" {type(entries).__name__}"
            )
        yield from entries


class _DelayedSendDecoratedOperator(DecoratedOperator, DelayedSendOperator):
    """Sends what a function returns or yields; see :func:`delayed_send_task`."""

    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *(name for name in DelayedSendOperator.template_fields if name not in _CONTENT),
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **DecoratedOperator.template_fields_renderers,
        **DelayedSendOperator.template_fields_renderers,
    }
    custom_operator_name = "@task.delayed_send"

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any],
        op_kwargs: Mapping[str, Any],
        **kwargs: Any,
    ) -> None:
        if unwanted := [name for name in _CONTENT if name in kwargs]:
            raise TypeError(f"the function gives the messages of @task.delayed_send; leave {', '.join(unwanted)}= out")
        if iscoroutinefunction(python_callable) or isasyncgenfunction(python_callable):
            raise TypeError("the function of @task.delayed_send must be a plain one: def, not async def")
        super().__init__(
            python_callable=python_callable,
            op_args=op_args,
            op_kwargs=op_kwargs,
            kwargs_to_upstream={"source": FunctionSource(python_callable.__name__)},
            **kwargs,
        )

    def execute(self, context: Context) -> dict[str, Any]:
        self.source = FunctionSource(self.python_callable.__name__, partial(self._call, context))
        summary: dict[str, Any] = super().execute(context)
        return summary

    def _call(self, context: Context) -> Any:
        everything = {**context, **self.op_kwargs}
        return self.python_callable(*self.op_args, **determine_kwargs(self.python_callable, self.op_args, everything))


def delayed_send_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """Turn a function into a task that sends the messages which it returns or yields.

    Each is a dictionary or a DelayedMessage, as in ``messages=`` of DelayedSendOperator. The function runs once in a
    try: its messages are spooled on the worker's disk, checked, and then sent. A retry on the same worker reads the
    spool; on another worker the function runs again, and the log says so.

    :param python_callable: the function; its arguments are templates, and shown in the UI.
    :param kwargs: the parameters of DelayedSendOperator and of each task; ``conn_id`` is required.
    """
    return task_decorator_factory(
        python_callable=python_callable,
        decorated_operator_class=_DelayedSendDecoratedOperator,
        **kwargs,
    )
