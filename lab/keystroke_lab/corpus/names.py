"""Which projects to request from the package index.

The curated list is Debian's, whose packages are known to be real, maintained software. `required` adds what
harvested projects depend on; `sampled` draws from the whole index, for projects too young for any list.
"""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable

from keystroke.errors import NotFound

_NOT_PROJECTS = re.compile(r"(-doc|-dbg|-dev|-examples|-data|-common|-all)$|\.")
# Debian drops a prefix or renames; the rest carry over as they are.
_RENAMED = {
    "bs4": "beautifulsoup4", "cairo": "pycairo", "dateutil": "python-dateutil", "git": "gitpython",
    "github": "pygithub", "jose": "python-jose", "jwt": "pyjwt", "ldap": "python-ldap",
    "magic": "python-magic", "nacl": "pynacl", "opengl": "pyopengl", "openssl": "pyopenssl",
    "pil": "pillow", "serial": "pyserial", "skimage": "scikit-image", "sklearn": "scikit-learn",
    "usb": "pyusb", "yaml": "pyyaml", "zmq": "pyzmq",
}  # fmt: skip


def debian_packages(prefix: str = "python3-") -> list[str]:
    """Debian's package names that begin so, from this machine's apt lists."""
    if shutil.which("apt-cache") is None:
        raise NotFound("apt-cache is not here; give the project names in a file instead (--names)")
    listed = subprocess.run(["apt-cache", "pkgnames", prefix], capture_output=True, text=True, check=True)
    return sorted(listed.stdout.split())


def package_names(packages: Iterable[str]) -> list[str]:
    """npm's names for Debian's node-* packages, in a stable order without repeats. Those with a scope are
    left out: Debian writes it as if it were a part of the name."""
    names = (package.removeprefix("node-") for package in packages)
    return list(dict.fromkeys(name for name in names if name and not _NOT_PROJECTS.search(name)))


def shuffled(names: Iterable[str], salt: str) -> list[str]:
    """The names in an order that has nothing to do with them: any first part is a fair sample."""
    return sorted(
        names, key=lambda name: hashlib.blake2b(name.encode(), digest_size=8, salt=salt.encode()).digest()
    )


def project_names(packages: Iterable[str]) -> list[str]:
    """Index names for Debian package names, in a stable order without repeats."""
    found: dict[str, None] = {}
    for package in packages:
        name = package.removeprefix("python3-")
        if name and not _NOT_PROJECTS.search(name):
            found[_RENAMED.get(name, name)] = None
    return list(found)


def sampled(names: Iterable[str], count: int, seed: int = 0) -> list[str]:
    """`count` names drawn from the index by `seed`; the order of `names` does not matter."""
    ordered = sorted(names)
    return random.Random(seed).sample(ordered, min(count, len(ordered)))


def required(requirements: Iterable[Iterable[str]], known: Iterable[str]) -> list[str]:
    """Names that projects require and that are not known yet, those most relied on first."""
    counts = Counter(name for names in requirements for name in set(names))
    there = set(known)
    return sorted((name for name in counts if name not in there), key=lambda name: (-counts[name], name))
