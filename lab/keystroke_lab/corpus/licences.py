"""The licence a project's metadata states, and whether it is permissive.

Reads metadata only and never guesses from file contents. Anything not clearly permissive is refused; so is a
project whose statements contradict each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# What the "License ::" classifiers call the permissive licences.
_CLASSIFIERS = {
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "BSD License": "BSD",
    "Apache Software License": "Apache-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "ISC License (ISCL)": "ISC",
    "The Unlicense (Unlicense)": "Unlicense",
    "zlib/libpng License": "Zlib",
    "Zope Public License": "ZPL-2.1",
    "Boost Software License 1.0 (BSL-1.0)": "BSL-1.0",
    "CC0 1.0 Universal (CC0 1.0) Public Domain Dedication": "CC0-1.0",
    "Public Domain": "Public-Domain",
    "Historical Permission Notice and Disclaimer (HPND)": "HPND",
    "Academic Free License (AFL)": "AFL-3.0",
}
_SPDX = frozenset(
    [
        "mit",
        "mit-0",
        "mit-cmu",
        "bsd-2-clause",
        "bsd-3-clause",
        "bsd-3-clause-clear",
        "bsd-2-clause-patent",
        "0bsd",
        "apache-2.0",
        "psf-2.0",
        "python-2.0",
        "python-2.0.1",
        "cnri-python",
        "isc",
        "unlicense",
        "zlib",
        "zpl-2.1",
        "bsl-1.0",
        "cc0-1.0",
        "hpnd",
        "blueoak-1.0.0",
        "wtfpl",
        "afl-3.0",
        "postgresql",
        "upl-1.0",
        "x11",
        "ncsa",
    ]
)
_WORD = r"( licen[sc]e)?"
_FREE_TEXT = tuple(
    (re.compile(pattern, re.I), name)
    for pattern, name in (
        (rf"^(the )?(mit|expat){_WORD}$", "MIT"),
        (rf"^(the )?(new |simplified |modified |revised )?bsd([ -]?[23]([ -]clause)?)?{_WORD}$", "BSD"),
        (rf"^([23][ -]clause )?bsd([ -][23][ -]clause)?( \"?(new|simplified)\"?)?{_WORD}$", "BSD"),
        (
            rf"^(the )?apache([ -]?(software )?licen[sc]e)?,?( ?-?v?(version )?2(\.0)?)?{_WORD}$",
            "Apache-2.0",
        ),
        (r"^apache-?2(\.0)?$", "Apache-2.0"),
        (rf"^isc{_WORD}$", "ISC"),
        (rf"^(psf|python|python software foundation){_WORD}$", "PSF-2.0"),
        (r"^(the )?unlicense$", "Unlicense"),
        (r"^public domain$", "Public-Domain"),
        (r"^zpl ?2\.1$", "ZPL-2.1"),
    )
)
_COPYLEFT = re.compile(
    r"gpl|general public|affero|mozilla|mpl|eupl|cecill|eclipse|sleepycat|proprietary|non-?commercial", re.I
)


def permissive_licence(info: Mapping[str, Any]) -> str | None:
    """The licence the `info` of a project's metadata states, if it is one we may use; else None."""
    expression = str(info.get("license_expression") or "").strip()
    stated = str(info.get("license") or "").strip()
    classifiers = [
        c.split(" :: ")[-1]
        for c in info.get("classifiers") or ()
        if isinstance(c, str) and c.startswith("License ::")
    ]
    classifiers = [c for c in classifiers if c != "OSI Approved"]
    if any(_COPYLEFT.search(text) for text in (expression, stated[:200], *classifiers)):
        return None
    if expression:
        parts = re.split(r"\s+(?:AND|OR)\s+", expression.replace("(", " ").replace(")", " ").strip())
        return expression if all(part.strip().lower() in _SPDX for part in parts) else None
    if classifiers:
        known = [_CLASSIFIERS.get(c) for c in classifiers]
        return " AND ".join(dict.fromkeys(k for k in known if k)) if all(known) else None
    if stated.lower() in _SPDX:
        return stated
    first_line = stated.split("\n", 1)[0].strip().rstrip(".")
    return next((name for pattern, name in _FREE_TEXT if pattern.match(first_line)), None)
