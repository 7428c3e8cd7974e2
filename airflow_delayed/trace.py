"""The context of the OpenTelemetry span in which a task sends, as the headers of W3C Trace Context."""

from __future__ import annotations

import sys

from airflow_delayed.message import TRACESTATE

#: The most characters of ``tracestate``; W3C asks to pass on at least these.
_LONGEST_STATE = 512


def current_trace() -> dict[str, str]:
    """Return ``traceparent`` and, if there is one, ``tracestate`` of the active span; empty if no span is active.

    It is empty too if nothing has loaded OpenTelemetry.
    """
    # who has not loaded it has no span; to load it here takes time and memory
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    # With [traces] otel_on = False, Airflow's tasks have a context all the same: made up, not sampled, of no tracer.
    # Receivers that go by their parent's decision would record nothing.
    sampled = trace.get_current_span().get_span_context().trace_flags.sampled
    if not sampled and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return {}
    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    if len(headers.get(TRACESTATE, "")) > _LONGEST_STATE:
        del headers[TRACESTATE]
    return headers
