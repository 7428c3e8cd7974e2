"""The consumer of docs/start/consumers.md with its inbox, as a process of its own, to be killed; see support.forked."""

from __future__ import annotations

import re
import sqlite3
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pika
import psycopg
import pymysql
from sqlalchemy import make_url

from support import pages
from support.stores import quoted

PAGE = Path(__file__).resolve().parents[2] / "docs/start/consumers.md"


def connected(url: str, schema: str | None = None) -> Any:
    """A plain connection to a database: a URL, or the path of a SQLite file."""
    if url.startswith("mysql"):
        parts = make_url(url)
        login = {"user": parts.username, "password": parts.password or ""}
        return pymysql.connect(host=parts.host, port=parts.port or 3306, database=schema or parts.database, **login)
    if url.startswith("postgres"):
        database = psycopg.connect(url)
        if schema is not None:
            database.execute(f"SET search_path TO {quoted(schema)}")
            database.commit()
        return database
    return sqlite3.connect(url, timeout=60)


def tables(database: Any) -> None:
    """Make the inbox as the page has it, and the table of the page's work."""
    other, mysql = [text for language, text in pages.blocks(PAGE) if language == "sql"]
    cursor = database.cursor()
    for statement in filter(str.strip, (mysql if isinstance(database, pymysql.Connection) else other).split(";")):
        cursor.execute(statement)
    cursor.execute("CREATE TABLE reminded (text VARCHAR(100))")
    database.commit()


def code(consumer: str, database: Any) -> str:
    """The page's function and one of its consumers, for a connection of a test."""
    python = [text for language, text in pages.blocks(PAGE) if language == "python"]
    (once,), (loop,) = ([text for text in python if word in text] for word in ("def once(", consumer))
    loop = re.sub(r'psycopg\.connect\("[^"]*"\)', "database", loop.replace("pika, psycopg", "pika"))
    return (once + loop).replace("%s", "?" if isinstance(database, sqlite3.Connection) else "%s")


def consume(pipe: Connection, *, url: str, schema: str | None, broker: pika.URLParameters) -> None:
    """Consume until it is killed."""
    database = connected(url, schema)
    loop = re.sub(r'pika\.URLParameters\("[^"]*"\)', "broker", code("basic_ack", database))
    exec(loop, {"database": database, "broker": broker})
