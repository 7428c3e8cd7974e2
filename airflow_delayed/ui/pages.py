"""The page itself and its files, which are read once and kept by browsers for a year."""

from __future__ import annotations

import mimetypes
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

from airflow_delayed.ui.route import GuardedRoute

router = APIRouter(include_in_schema=False, route_class=GuardedRoute)

_FOLDER = Path(__file__).parent / "static"
_YEAR = "private, max-age=31536000, immutable"
#: Of what may change at any time, such as a file that is asked for without its hash.
_NOW = "no-cache"


@dataclass(frozen=True, slots=True)
class Files:
    """The page's files, with a hash of them all."""

    hash: str
    contents: dict[str, bytes]


@cache
def files() -> Files:
    """Return the files of the folder ``static``."""
    contents = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.is_file()}
    whole = sha256()
    for name, content in contents.items():
        whole.update(f"{name} {len(content)} ".encode() + content)
    return Files(whole.hexdigest()[:16], contents)


@router.get("/")
async def page(request: Request) -> Response:
    """Return the page; its files have their hash in their address."""
    found = files()
    html = found.contents["index.html"].replace(b'"static/', f'"static/{found.hash}/'.encode())
    return Response(html, media_type="text/html; charset=utf-8", headers={"Cache-Control": _NOW})


@router.get("/static/{name}")
async def file(name: str) -> Response:
    """Return a file as it is now."""
    return _file(name, _NOW)


@router.get("/static/{hash_}/{name}")
async def hashed_file(hash_: str, name: str) -> Response:
    """Return a file; it never changes under this address, unless it is an old one."""
    return _file(name, _YEAR if hash_ == files().hash else _NOW)


def _file(name: str, cache_control: str) -> Response:
    content = files().contents.get(name)
    if content is None or name == "index.html":
        raise HTTPException(404, "the page has no such file")
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    if name.endswith(".js"):
        kind = "text/javascript"  # which some systems do not know
    text = kind.startswith("text/") or kind == "image/svg+xml"
    media_type = f"{kind}; charset=utf-8" if text else kind
    return Response(content, media_type=media_type, headers={"Cache-Control": cache_control})
