"""Which licence a project's own metadata states, and whether we may learn from it.

Law: reads metadata only, never guesses from file text. Anything that is not clearly permissive is refused;
so is a project whose statements contradict each other (one permissive, one copyleft).
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
_SPDX = {
    "mit", "mit-0", "mit-cmu", "bsd-2-clause", "bsd-3-clause", "bsd-3-clause-clear", "0bsd", "apache-2.0", "psf-2.0",
    "python-2.0", "python-2.0.1", "cnri-python", "isc", "unlicense", "zlib", "zpl-2.1", "bsl-1.0", "cc0-1.0", "hpnd",
    "bsd-2-clause-patent", "blueoak-1.0.0", "wtfpl", "afl-3.0", "postgresql", "upl-1.0", "x11", "ncsa",
}  # fmt: skip
_FREE_TEXT = (
    (re.compile(r"^(the )?(mit|expat)( license| licence)?$", re.I), "MIT"),
    (
        re.compile(
            r"^(the )?(new |simplified |modified |revised )?bsd([ -]?[23]([ -]clause)?)?( license| licence)?$",
            re.I,
        ),
        "BSD",
    ),
    (
        re.compile(
            r"^([23][ -]clause )?bsd([ -][23][ -]clause)?( \"?(new|simplified)\"?)?( license| licence)?$",
            re.I,
        ),
        "BSD",
    ),
    (
        re.compile(
            r"^(the )?apache([ -]?(software )?(license|licence))?,?( ?-?v?(version )?2(\.0)?)?( license| licence)?$",
            re.I,
        ),
        "Apache-2.0",
    ),
    (re.compile(r"^apache-?2(\.0)?$", re.I), "Apache-2.0"),
    (re.compile(r"^isc( license| licence)?$", re.I), "ISC"),
    (re.compile(r"^(psf|python|python software foundation)( license| licence)?$", re.I), "PSF-2.0"),
    (re.compile(r"^(the )?unlicense$", re.I), "Unlicense"),
    (re.compile(r"^public domain$", re.I), "Public-Domain"),
    (re.compile(r"^zpl ?2\.1$", re.I), "ZPL-2.1"),
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
