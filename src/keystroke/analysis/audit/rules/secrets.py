"""Recognises secrets in source, by the name they are assigned to and by the key formats of providers.

A name alone is not enough: the value must not look like a placeholder, a label or a path.
"""

from __future__ import annotations

import math
import re
from collections import Counter

_NAME = re.compile(
    r"(?i)(?:^|[\W_]|(?<=[a-z]))(pass(?:word|wd|phrase|code)?|pwd|secret(?:_?key)?|api_?key|apikey|access_?key|auth_?(?:key|token)"
    r"|access_?token|token|private_?key|encryption_?key|signing_?key|client_?secret|credentials?|aes_?key|crypt(?:o)?_?key|jwt_?(?:key|secret))(?:_?\d)?$"
)
_KEY = re.compile(r"(?i)(?:^|_)keys?$")
_RANDOM = re.compile(r"(?=.*\d)(?=.*[a-z])(?=.*[A-Z])[A-Za-z0-9+/=_\-]+")  # looks random
_NAMED = re.compile(
    r"(?:[A-Za-z]+\d{0,2}[A-Za-z]{0,3}[_-])+[A-Za-z]*\d{0,2}[A-Za-z]{0,3}|(?:[A-Za-z]+[_-])+[A-Za-z]+"
)
_STRONG = re.compile(r"(?i)pass|pwd|secret")
_PLACEHOLDER = re.compile(
    r"(?i)\(\?|^[\W_]*$|^<.*>$|^\$?\{.*\}|^%[(\w]|x{4,}|\*{3,}|\.\.\.|your[_\- ]|change[_\- ]?me"
    r"|placeholder|example|dummy|(?<![a-z])demo(?![a-z])|redacted|^none$|^null$|^utf-?(?:8|16|32)$|^ascii$|^latin-?1$"
    r"|^(?:true|false|yes|no|bearer|basic|string|text|required|optional|hidden|plain|enabled|disabled|default)$"
    r"|^Eby8vdM02x|^env[.:]|process\.env|os\.environ|^todo"
)
_OTHER_PASS = re.compile(r"(?i)(?:band|high|low|by|com|tres|sur|under|over|all|notch)_?pass$")
_NUMBERS = re.compile(r"[\d.]+(?:[-:,/][\d.]+)+|(?:0x)?0+")  # ranges, dates, numbers of people, zeros
_COUNTED = re.compile(r"(?i)abcdefgh|12345678|(\w)\1{7}")
_KEY_BYTES = re.compile(r"(?:\\[nr]|[\s\"'+,`#*\\])*(?:[A-Z][\w-]*: [^\n]*\s+)*[A-Za-z0-9+/=]{16}")
_MEDIA_TYPE = re.compile(r"(?:application|text|image|audio|video|multipart|message)/[\w.+*-]+(?:;|$)")
_FILE = re.compile(r"(?i)^[a-z]:[\\/]|\.(?:json|pem|key|crt|cer|p12|pfx|jks|txt|ya?ml|toml|ini|env)$")
_LABEL = re.compile(
    r"(?i)^[\w\-. /:]*(?:password|passwd|pwd|secret|token|api[_\- ]?key|credential"
    r"|passphrase|_key|auth)s?[\w\-.:/ ]*$"
)
_WORDS = (
    r"(?:pass(?:word|wd|phrase|code)?|pwd|secret|token|credentials?"
    r"|(?:api|access|auth|private|encryption|signing|aes|crypto?|secret|jwt)_?key)"
)
SECRET_WORDS = (
    *("Pass", "pass", "PASS", "Pwd", "pwd", "PWD", "ecret", "ECRET", "oken", "OKEN"),
    *("redential", "REDENTIAL", "Key", "key", "KEY"),
)
# A literal assigned to or compared with a secret's name: without this no value can be a secret.
ASSIGNED = re.compile(
    rf"(?i)(?:{_WORDS}|key)(?:_?\d)?[\"']?\]?\s*(?::[^=\n]{{0,60}})?[=:!][^\n]*(?:\(\s*\n[^\n]*)?[\"'`]"
    rf"|[\"'`]\s*[!=]==?\s*[\w.]*{_WORDS}"
)
FORMATS = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{40,}|glpat-[A-Za-z0-9_\-]{20}"
    r"|xox[abprs]-[0-9A-Za-z\-]{20,}|sk_live_[0-9A-Za-z]{20,}|rk_live_[0-9A-Za-z]{20,}|AIza[0-9A-Za-z_\-]{35}|npm_[A-Za-z0-9]{36}"
    r"|SG\.[\w\-]{20,}\.[\w\-]{30,}|ya29\.[\w\-]{40,}|sk-(?:proj-|ant-)?[A-Za-z0-9_\-]{40,}|pypi-AgEIcHlwaS[\w\-]{50,})"
    r"|-----BEGIN (?:RSA |EC |DSA |OPENSSH |PGP )?PRIVATE KEY(?: BLOCK)?-----"
)


FORMAT_MARKS = (
    *("AKIA", "ASIA", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox"),
    *("k_live_", "AIza", "npm_", "SG.", "ya29.", "sk-", "pypi-AgE", "PRIVATE KEY"),
)


# Secrets in any language: a literal assigned to a name (also unfinished), a line of a settings file, a login
# in a URL or a header, a signed token.
_LITERAL = re.compile(
    r"([A-Za-z_][\w.\-]{0,80})[\"']?\]?\s*(?::[^=\n\"'`]{0,60})?(?:[=:!]=?|=>)\s*[bruf]{0,2}[\"'`]([^\"'`\n]{3,400})"
)
_SETTING = re.compile(
    r"(?m)^[\s\-]*(?:export\s+)?([A-Za-z_][\w.\-]{0,80})\s*[=:]\s*([^\s\"'`()\[\]{};,]{6,400})\s*$"
)
_LOGIN = re.compile(
    r"\w://[^\s/:@\"'`]{0,80}:(?!\$|\{|<|%)[^\s/@\"'`]{3,200}@|(?i:bearer|basic)\s+[\w\-.=+/]{16,}"
)
_SIGNED = re.compile(r"(?<![\w\-])eyJ[\w\-]{14,}\.[\w\-]{10,}\.[\w\-]{8,}")
_DRAWN = re.compile(r"[\"'`]([A-Za-z0-9+/=_\-]{32,400})[\"'`]")


def holds_secret(text: str) -> bool:
    """Whether any text contains something that looks like a secret.

    Errs on the side of yes: it decides what not to store.
    """
    if FORMATS.search(text) or _LOGIN.search(text) or _SIGNED.search(text):
        return True
    if any(is_secret(name, value) for name, value in _LITERAL.findall(text)):
        return True
    if any(_RANDOM.fullmatch(value) and entropy(value) >= 4.0 for value in _DRAWN.findall(text)):
        return True
    return any(re.search(r"\d", v) and "." not in v and is_secret(n, v) for n, v in _SETTING.findall(text))


def entropy(text: str) -> float:
    """Shannon entropy in bits per character."""
    counts = Counter(text)
    return (
        -sum(count / len(text) * math.log2(count / len(text)) for count in counts.values()) if text else 0.0
    )


def is_placeholder(value: str) -> bool:
    """Whether a text stands for a secret that is written elsewhere, or counts up the alphabet."""
    return _PLACEHOLDER.search(value) is not None or _COUNTED.search(value) is not None


def is_formatted_secret(text: str, start: int, end: int) -> bool:
    """Whether what `FORMATS` found in a text is a key: no example, and a private key with its bytes."""
    value = text[start:end]
    if value.startswith("-----"):
        return _KEY_BYTES.match(text, end) is not None
    return "EXAMPLE" not in value and _COUNTED.search(value) is None


def is_secret(name: str, value: str) -> bool:
    """Whether `name = value` is a hard-coded secret."""
    found = _NAME.search(name)
    if found is None and _KEY.search(name):
        return (
            len(value) >= 24
            and not _NAMED.fullmatch(value)
            and _RANDOM.fullmatch(value) is not None
            and entropy(value) >= 4.0
        )
    if found is None or not 3 <= len(value) <= 400 or _PLACEHOLDER.search(value):
        return False
    if found[1].lower() == "pass" and (
        _OTHER_PASS.search(name)
        or not (len(value) >= 8 or re.search(r"[\d\W]", value))
        or re.fullmatch(r"[A-Z]+(?:_[A-Z]+)+", value)  # the name of a state
    ):
        return False  # a pass of another kind
    if _NUMBERS.fullmatch(value):
        return False
    if _MEDIA_TYPE.match(value):
        return False
    if _LABEL.match(value) and not re.search(r"\d", value):
        return False
    if not value.isascii() or value.lower() == name.strip("_").lower():
        return False  # a text of a language, or a name that stands for itself
    if value.rstrip() != value and value.rstrip()[-1:] in (":", "?", ">"):
        return False  # a text that asks for a secret
    if (
        value.count(" ") > 1
        or value.startswith(("/", "http://", "https://", "--", "./"))
        or _FILE.search(value)
        or "{" in value
        or "%s" in value
    ):
        return False
    if _STRONG.search(found[1]):
        return not value[0].isspace() and not (
            re.fullmatch(r"[A-Z][a-z]+(?: [a-z]+)*", value) and " " in value
        )
    return (
        len(value) >= 8
        and " " not in value
        and (entropy(value) >= 3.0 or bool(re.search(r"\d", value)))
        and bool(re.search(r"[0-9]|[A-Z].*[a-z]|[a-z].*[A-Z]", value))
    )
