"""Access control: keys, origins and host names.

Decides from headers alone, before a body is read or a socket accepted. Browsers send an Origin and act for
whatever page is open, so pages of other sites have to be allowed by name; programs send no Origin.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from keystroke.config import ServerSettings
from keystroke.errors import ConfigError, Forbidden, KeystrokeError
from keystroke.gateway.access.keys import ANONYMOUS, LOCAL, Caller, KeyRing

EDITORS = ("vscode-webview", "vscode-file")  # schemes of an editor's own pages
# Types of bodies that a browser sends to any site without asking it first.
_UNASKED = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def static_keys(server: ServerSettings, environ: Mapping[str, str] | None = None) -> list[str]:
    """The keys that the environment and `server.keys_file` name."""
    environ = os.environ if environ is None else environ
    keys = [key.strip() for key in environ.get(server.api_key_env, "").split(",")]
    if server.keys_file is not None:
        try:
            lines = server.keys_file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            raise ConfigError(f"server.keys_file {server.keys_file} cannot be read; check the path") from None
        keys += [line.strip() for line in lines if not line.lstrip().startswith("#")]
    return [key for key in keys if key]


def readable_files(server: ServerSettings, origin: str | None) -> Callable[[str], bool]:
    """Which paths the server may read for a live client: none for web pages and beyond loopback, where the
    editor's files are on another machine; else those inside `server.workspaces`, or any where that is
    empty."""
    page = origin is not None and scheme_of(origin) not in EDITORS
    if page or not is_loopback(server.host):
        return lambda _path: False
    roots = [Path(root).expanduser().resolve() for root in server.workspaces]

    def readable(path: str) -> bool:
        try:
            real = Path(path).resolve()
        except (OSError, RuntimeError, ValueError):
            return False
        if real == Path(real.anchor):  # a whole disk is not a workspace
            return False
        return not roots or any(real.is_relative_to(root) for root in roots)

    return readable


def scheme_of(origin: str) -> str | None:
    """The scheme of an origin; None where it cannot be parsed."""
    try:
        return urlsplit(origin).scheme
    except ValueError:
        return None


def build_key_ring(server: ServerSettings, environ: Mapping[str, str] | None = None) -> KeyRing:
    """Keys are required beyond loopback, and wherever static keys are configured."""
    static = static_keys(server, environ)
    local = is_loopback(server.host)
    return KeyRing(required=bool(static) or not local, static=static, trusted=local)


SUBPROTOCOL = "keystroke"  # offered by a page beside its key, and selected by the server
_BEARER = "keystroke.bearer."  # followed by the key, base64url without padding


def bearer_from_subprotocols(subprotocols: Sequence[str]) -> str | None:
    """The value of the Authorization header from a page's subprotocols; None without one."""
    for offered in subprotocols:
        if offered.startswith(_BEARER):
            coded = offered.removeprefix(_BEARER)
            try:
                key = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
                return f"Bearer {key.decode()}"
            except ValueError:
                return "Bearer not-a-key"  # refused where a key is required
    return None


def _api_key(headers: Mapping[str, str]) -> str | None:
    """The value of the Authorization header from `x-api-key`, which Anthropic's clients send."""
    key = headers.get("x-api-key")
    return f"Bearer {key}" if key else None


def check_origin(origin: str | None, host: str | None, allowed: Iterable[str] = ()) -> None:
    """Raises Forbidden for a page of another site."""
    if origin is None or origin in allowed or "*" in allowed:
        return
    if _same_site(origin, host):
        return
    raise Forbidden(f"Pages from {origin:.100} may not use this server; start it with --allow-origin.")


def check_fetch(headers: Mapping[str, str], allowed: Iterable[str] = ()) -> None:
    """Raises Forbidden for what a page of another site can send without being asked: a request without an
    Origin, or a body of a type that needs no permission. Programs send no such headers."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    known = origin is not None and (
        origin in allowed or "*" in allowed or _same_site(origin, headers.get("host"))
    )
    if site == "cross-site" and not known:
        raise Forbidden("Pages of other sites may not use this server; start it with --allow-origin.")
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media in _UNASKED and (origin is not None or site is not None):
        raise Forbidden(f"A page must send its body as application/json, not as {media}.")


def check_page(
    origin: str | None, host: str | None, allowed: Iterable[str] = (), *, has_key: bool = False
) -> None:
    """Raises Forbidden for pages that may not change files: all but the server's own, those allowed by name,
    and an editor's with a key (any extension can show a page). Another local page may only use models."""
    if origin is None or origin in allowed or "*" in allowed or (has_key and scheme_of(origin) in EDITORS):
        return
    try:
        own = bool(host) and urlsplit(origin).netloc == host
    except ValueError:
        own = False
    if not own:
        raise Forbidden(
            f"Pages from {origin:.100} may not work on files; start the server with --allow-origin."
        )


def _same_site(origin: str, host: str | None) -> bool:
    try:
        parts = urlsplit(origin)
        if parts.netloc and parts.netloc == host:
            return True
        if parts.scheme in EDITORS:
            return True
        # A page of this machine that calls this machine.
        return host is not None and is_loopback(parts.hostname or "") and is_loopback(_hostname(host))
    except ValueError:  # not a URL
        return False


def check_host(host: str | None, bound: str, allowed: Iterable[str] = ()) -> None:
    """Raises Forbidden where a loopback server is addressed by another name than loopback's or an allowed
    origin's: prevents DNS rebinding."""
    if not is_loopback(bound) or host is None:
        return
    try:
        name = _hostname(host)
        known = is_loopback(name) or name in {urlsplit(origin).hostname for origin in allowed}
    except ValueError:
        known = False
    if not known:
        raise Forbidden("This server answers only to localhost; start it with --host to listen wider.")


def _hostname(host: str) -> str:
    return urlsplit(f"//{host}").hostname or ""


class Access(Enum):
    """Who may call a route."""

    KEY = "key"  # callers with an accepted key; on loopback, programs and local pages without one
    FILES = "files"  # KEY, but no page except the server's own, those allowed by name, an editor's with a key
    OPTIONAL = "optional"  # anybody; without an accepted key as ANONYMOUS
    HOST = "host"  # anybody who addresses the server by an allowed name
    PUBLIC = "public"  # anybody


class AccessControl:
    """Authenticates a caller from the headers alone, before a body is read or a socket accepted."""

    def __init__(self, keys: KeyRing, server: ServerSettings) -> None:
        self._keys, self._host, self._origins = keys, server.host, server.origins

    def check(self, access: Access, headers: Mapping[str, str], subprotocols: Sequence[str] = ()) -> Caller:
        """The caller. A page cannot set headers on a socket, so its key may come as a subprotocol. Raises
        Unauthorized or Forbidden."""
        if access is Access.PUBLIC:
            return ANONYMOUS
        if access is Access.OPTIONAL:
            try:
                return self.check(Access.KEY, headers, subprotocols)
            except KeystrokeError:
                return ANONYMOUS
        host, origin = headers.get("host"), headers.get("origin")
        check_host(host, self._host, self._origins)
        if access is Access.HOST:
            return ANONYMOUS
        check_fetch(headers, self._origins)
        check_origin(origin, host, self._origins)
        caller = self._keys.authenticate(
            headers.get("authorization") or _api_key(headers) or bearer_from_subprotocols(subprotocols)
        )
        if access is Access.FILES:
            check_page(origin, host, self._origins, has_key=caller != LOCAL)
        return caller
