"""Bearer keys: creation, checking, revocation.

A secret exists in clear text only when it is created and shown. Stored is its SHA-256 (secrets are 256
random bits, so a slow hash adds nothing), compared in constant time. A key is `ks_ID_SECRET`; the public id
finds the row, so no comparison runs over all keys.
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
    priority: bool = False  # may request a higher priority
    monthly_tokens: int = 0  # budgets of a calendar month; 0 means no limit
    monthly_cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. `priority`: it may request a higher priority than the endpoint's own."""

    id: str
    name: str
    priority: bool = False


LOCAL = Caller("local", "local", priority=True)  # whom a loopback server accepts without a key
ANONYMOUS = Caller("anonymous", "anonymous")  # whom a public route lets in without a key


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def make_key(
    name: str, *, priority: bool = False, monthly_tokens: int = 0, monthly_cost: float = 0.0
) -> tuple[Key, str]:
    """A new key and its clear text, which is shown once and not stored."""
    identity, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    token = f"{PREFIX}_{identity}_{secret}"
    key = Key(identity, name, digest(token), time.time(), None, priority, monthly_tokens, monthly_cost)
    return key, token


class KeyRing:
    """The accepted keys. Where none is `required`, callers without one are LOCAL. `trusted`: static keys may
    request a higher priority, as on a machine that only its user reaches."""

    def __init__(self, *, required: bool, static: Iterable[str] = (), trusted: bool = True) -> None:
        self.required = required
        self._trusted = trusted
        # Static keys (of a file or the environment) have no row: their digest identifies them.
        self._static = tuple(digest(token.strip()) for token in static if token.strip())
        self._stored: dict[str, Key] = {}

    def set_stored_keys(self, keys: Iterable[Key]) -> None:
        """Replace the stored keys; revoked ones are dropped."""
        self._stored = {key.id: key for key in keys if key.revoked_at is None}

    @property
    def is_empty(self) -> bool:
        return not self._static and not self._stored

    def still_accepts(self, caller: Caller) -> bool:
        """Whether the key of this caller is still accepted."""
        if caller == LOCAL:
            return not self.required
        return caller.id in self._stored or any(
            self._static_caller(known) == caller for known in self._static
        )

    def owner(self, caller: Caller, *, loopback: bool) -> str:
        """The owner of what a caller creates. On a loopback address the only static key stands for this
        machine's user: a shared gateway creates another at each start."""
        only = len(self._static) == 1 and caller == self._static_caller(self._static[0])
        return LOCAL.id if loopback and only else caller.id

    def authenticate(self, authorization: str | None) -> Caller:
        """The caller behind an Authorization header. Raises Unauthorized."""
        token = _bearer(authorization)
        if token is None:
            if self.required:
                raise Unauthorized("This server needs a key; send it as `Authorization: Bearer KEY`.")
            return LOCAL
        offered = digest(token)
        for known in self._static:
            if hmac.compare_digest(offered, known):
                return self._static_caller(known)
        parts = token.split("_", 2)
        key = self._stored.get(parts[1]) if len(parts) == 3 and parts[0] == PREFIX else None
        # Compare even without a row, so that an unknown id takes as long as a wrong secret.
        if hmac.compare_digest(offered, key.digest if key else digest("")) and key is not None:
            return Caller(key.id, key.name, key.priority)
        if not self.required:
            return LOCAL  # SDKs always send some key; a loopback server accepts any
        raise Unauthorized("This key is not accepted; create one with `keystroke keys create NAME`.")

    def _static_caller(self, known: str) -> Caller:
        """Identified by the key's digest, which does not depend on its position in a list."""
        return Caller(f"static_{known[:16]}", f"static key {known[:6]}", self._trusted)


def _bearer(header: str | None) -> str | None:
    if header is None:
        return None
    scheme, _, token = header.partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None
