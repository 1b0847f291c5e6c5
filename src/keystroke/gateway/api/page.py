"""The files of the playground, as a browser gets them.

Serves the files built into the package from memory, under a content security policy that allows nothing
else: no inline script, no other address, no frame. Styles that the editor creates carry the nonce of the
visit. The files contain no user data and need no key; the page's requests to the server do.
"""

from __future__ import annotations

import gzip
import hashlib
import secrets
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from keystroke.errors import NotFound

NONCE = b"__NONCE__"  # placeholder in index.html
_KINDS = {"app.js": "text/javascript", "app.css": "text/css", "icon.svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    packed: bytes  # gzip
    kind: str
    tag: str


def content_security_policy(nonce: str) -> str:
    """Trusted Types make every sink that parses text as HTML or script throw, so that a file's name or
    content cannot become either."""
    return (
        "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self'; "
        f"style-src 'self' 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


@cache
def asset(name: str) -> Asset:
    """A file of the page. Raises NotFound."""
    if name not in _KINDS:
        raise NotFound("The playground has no such file.")
    body = files("keystroke").joinpath("gateway", "page", name).read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    return Asset(body, gzip.compress(body, mtime=0), f"{_KINDS[name]}; charset=utf-8", tag)


@cache
def _index() -> bytes:
    return files("keystroke").joinpath("gateway", "page", "index.html").read_bytes()


def index_response() -> HttpResponse:
    nonce = secrets.token_urlsafe(16)
    headers = _headers() | {
        "content-security-policy": content_security_policy(nonce),
        "cache-control": "no-store",
    }
    return HttpResponse(_index().replace(NONCE, nonce.encode()), 200, headers, "text/html; charset=utf-8")


def asset_response(request: Request, name: str) -> HttpResponse:
    """The file, compressed where the browser accepts it; 304 where it has it. Raises NotFound."""
    found = asset(name)
    headers = _headers() | {"etag": found.tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == found.tag:
        return HttpResponse(b"", 304, headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return HttpResponse(found.packed, 200, headers | {"content-encoding": "gzip"}, found.kind)
    return HttpResponse(found.body, 200, headers, found.kind)


def _headers() -> dict[str, str]:
    return {
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }
