"""Bearer keys: made, checked, revoked.

A secret exists in clear only in the moment it is made and shown. At rest there is its SHA-256 (secrets
are 256 random bits, so a slow hash would add nothing), compared in constant time. A key is `ks_ID_SECRET`;
the id is public and finds the row, so no comparison ever runs over all keys.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

from keystroke.errors import Unauthorized

PREFIX = "ks"


@dataclass(frozen=True, slots=True)
class Key:
    """A key as stored: never the secret."""

    id: str
    name: str
    digest: str
    created_at: float
    revoked_at: float | None = None
    priority: bool = False  # may ask to go before others


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is asking. `local` is the anonymous caller a loopback server accepts. `priority`: may ask to go
    before others."""

    id: str
    name: str
    priority: bool = False


LOCAL = Caller("local", "local", priority=True)


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def make_key(name: str, now: float | None = None, *, priority: bool = False) -> tuple[Key, str]:
    """A new key and its clear text, which is shown once and kept nowhere."""
    identity, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    token = f"{PREFIX}_{identity}_{secret}"
    made = time.time() if now is None else now
    return Key(identity, name, digest(token), made, priority=priority), token


class KeyRing:
    """The accepted keys. Empty and not `required`: everyone is the local caller. `trusted`: given keys may
    ask to go before others, as on a machine that only its user reaches."""

    def __init__(self, *, required: bool, static: Iterable[str] = (), trusted: bool = True) -> None:
        self.required = required
        self._trusted = trusted
        # Keys given by file or environment have no row: they are known by their digest alone.
        self._static = tuple(digest(token.strip()) for token in static if token.strip())
        self._stored: dict[str, Key] = {}

    def replace(self, keys: Iterable[Key]) -> None:
        """The stored keys as they are now; revoked ones no longer open anything."""
        self._stored = {key.id: key for key in keys if key.revoked_at is None}

    @property
    def empty(self) -> bool:
        return not self._static and not self._stored

    def holds(self, caller: Caller) -> bool:
        """Whether what let this caller in would still let it in."""
        if caller == LOCAL:
            return not self.required
        return caller.id in self._stored or any(self._given(known) == caller for known in self._static)

    def owner(self, caller: Caller, *, loopback: bool) -> str:
        """Whose things a caller's are: on a loopback address the only key that was given stands for this
        machine's user, for whom another is made whenever a gateway starts."""
        only = len(self._static) == 1 and caller == self._given(self._static[0])
        return LOCAL.id if loopback and only else caller.id

    def check(self, authorization: str | None) -> Caller:
        """The caller behind an Authorization header. Raises Unauthorized."""
        token = _bearer(authorization)
        if token is None:
            if self.required:
                raise Unauthorized("This server needs a key; send it as `Authorization: Bearer KEY`.")
            return LOCAL
        offered = digest(token)
        for known in self._static:
            if hmac.compare_digest(offered, known):
                return self._given(known)
        parts = token.split("_", 2)
        key = self._stored.get(parts[1]) if len(parts) == 3 and parts[0] == PREFIX else None
        # Compare even without a row, so that an unknown id takes as long as a wrong secret.
        if hmac.compare_digest(offered, key.digest if key else digest("")) and key is not None:
            return Caller(key.id, key.name, key.priority)
        if not self.required:
            return LOCAL  # SDKs always send some key; a loopback server does not care which
        raise Unauthorized("This key is not accepted; create one with `keystroke keys create NAME`.")

    def _given(self, known: str) -> Caller:
        """By the key's own digest: a place in a list would name somebody else after the list has changed."""
        return Caller(f"static_{known[:16]}", f"static key {known[:6]}", self._trusted)


def _bearer(header: str | None) -> str | None:
    if header is None:
        return None
    scheme, _, token = header.partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None
