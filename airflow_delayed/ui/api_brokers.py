"""What waits in RabbitMQ and in SQS, and moving back what could not be delivered."""

from __future__ import annotations

from fastapi import APIRouter

from airflow_delayed.ui.models import RabbitMQSummary, Redriven, SqsSummary
from airflow_delayed.ui.requests import Redrive

router = APIRouter(tags=["brokers"])


@router.get("/rabbitmq/{connection_id}/summary")
def rabbitmq(connection_id: str) -> RabbitMQSummary:
    """Return what waits and when it leaves, what is unroutable and what is stuck."""
    raise NotImplementedError


@router.post("/rabbitmq/{connection_id}/redrive")
def redrive_rabbitmq(connection_id: str, redrive: Redrive) -> Redriven:
    """Send up to 1000 unroutable messages to those destinations that exist by now."""
    raise NotImplementedError


@router.get("/sqs/{connection_id}/{queue}/summary")
def sqs(connection_id: str, queue: str) -> SqsSummary:
    """Return what the queues of one destination hold."""
    raise NotImplementedError


@router.post("/sqs/{connection_id}/{queue}/redrive")
def redrive_sqs(connection_id: str, queue: str, redrive: Redrive) -> Redriven:
    """Move the messages of a destination's dead-letter queue back."""
    raise NotImplementedError
