"""Who may come in: keys and origins.

Decides from headers alone, before a body is read or a socket accepted. Browsers send an Origin and
act for whatever page is open, so a page that is not ours needs to be allowed by name; programs send none.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from keystroke.config import ServerSettings
from keystroke.errors import ConfigError, Forbidden
from keystroke.gateway.access.keys import KeyRing

EDITORS = ("vscode-webview", "vscode-file")  # schemes of pages that are an editor's own


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def given_keys(server: ServerSettings, environ: Mapping[str, str] | None = None) -> list[str]:
    """Keys that file and environment name; their text never leaves the key ring."""
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
    """Which paths a live client may have read for it. Only a server on the editor's own machine has the
    editor's files, and only a program may name them: a page, whoever let it in, knows what it was shown.
    Where `server.workspaces` names folders, nothing outside them is read."""
    page = origin is not None and scheme_of(origin) not in EDITORS
    if page or not is_loopback(server.host):
        return lambda _path: False
    roots = [Path(root).expanduser().resolve() for root in server.workspaces]

    def readable(path: str) -> bool:
        try:
            real = Path(path).resolve()
        except (OSError, RuntimeError, ValueError):
            return False
        if real == Path(real.anchor):  # nobody opens a whole disk
            return False
        return not roots or any(real.is_relative_to(root) for root in roots)

    return readable


def scheme_of(origin: str) -> str | None:
    """The scheme of an origin; None for what is none."""
    try:
        return urlsplit(origin).scheme
    except ValueError:
        return None


def key_ring(server: ServerSettings, environ: Mapping[str, str] | None = None) -> KeyRing:
    """Keys are needed beyond loopback, and wherever some were given."""
    static = given_keys(server, environ)
    local = is_loopback(server.host)
    return KeyRing(required=bool(static) or not local, static=static, trusted=local)


SUBPROTOCOL = "keystroke"  # what a page offers beside its key, and what is chosen
_BEARER = "keystroke.bearer."  # then the key, base64url without padding: any text fits a header so


def bearer_offered(subprotocols: Sequence[str]) -> str | None:
    """The Authorization header that a page could not set, from the subprotocols it offers instead."""
    for offered in subprotocols:
        if offered.startswith(_BEARER):
            coded = offered.removeprefix(_BEARER)
            try:
                key = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
                return f"Bearer {key.decode()}"
            except ValueError:
                return "Bearer not-a-key"  # offered and unreadable: refused where a key is needed
    return None


def check_origin(origin: str | None, host: str | None, allowed: Iterable[str] = ()) -> None:
    """Refuse a page of another site. Raises Forbidden."""
    if origin is None or origin in allowed or "*" in allowed:
        return
    if _same_site(origin, host):
        return
    raise Forbidden(f"Pages from {origin:.100} may not use this server; start it with --allow-origin.")


def check_page(origin: str | None, host: str | None, allowed: Iterable[str] = ()) -> None:
    """Refuse what changes files to any page but the server's own, an editor's, and those allowed by name:
    another program's page on this machine may use models, no more. Raises Forbidden."""
    if origin is None or origin in allowed or "*" in allowed or scheme_of(origin) in EDITORS:
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
        # Pages served from this machine to this machine.
        return host is not None and is_loopback(parts.hostname or "") and is_loopback(_hostname(host))
    except ValueError:  # not an address at all
        return False


def check_host(host: str | None, bound: str, allowed: Iterable[str] = ()) -> None:
    """A loopback server answers only to loopback names and to those of allowed origins, whatever else is
    allowed: a page cannot reach it by re-pointing a domain of its own. Raises Forbidden."""
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
