"""A rename reaches every caller, however the project is laid out."""
# ruff: noqa: E501 - a file is one line

from __future__ import annotations

from pathlib import Path

import pytest

from keystroke.analysis.refactor import Refactoring
from keystroke.errors import InputError
from keystroke.text import apply_edits

CORE = "def price(n):\n    return n\n"
TEST = "from shop.core import price\n\n\ndef test_it():\n    assert price(1) == 1\n"
USE = "from .core import price\n\n\ndef total(ns):\n    return sum(price(n) for n in ns)\n"
INIT = 'from .core import price\n\n__all__ = ["price"]\n'
# The file that defines `price`, and the other files.
LAYOUTS: dict[str, tuple[str, dict[str, str]]] = {
    "flat modules": ("core.py", {"use.py": "from core import price\n\nprint(price(1))\n"}),
    "flat modules, tests beside": (
        "core.py",
        {"tests/test_core.py": "import core\n\n\ndef test_it():\n    assert core.price(1) == 1\n"},
    ),
    "package, tests without __init__": (
        "shop/core.py",
        {"shop/__init__.py": INIT, "shop/cart.py": USE, "tests/test_core.py": TEST},
    ),
    "package, tests with __init__": (
        "shop/core.py",
        {"shop/__init__.py": INIT, "shop/cart.py": USE, "tests/__init__.py": "", "tests/test_core.py": TEST},
    ),
    "src, tests without __init__": (
        "src/shop/core.py",
        {"src/shop/__init__.py": INIT, "src/shop/cart.py": USE, "tests/test_core.py": TEST},
    ),
    "src, tests with __init__": (
        "src/shop/core.py",
        {
            "src/shop/__init__.py": INIT,
            "src/shop/cart.py": USE,
            "tests/__init__.py": "",
            "tests/test_core.py": TEST,
        },
    ),
    "src, nested tests": (
        "src/shop/core.py",
        {
            "src/shop/__init__.py": "",
            "tests/__init__.py": "",
            "tests/unit/__init__.py": "",
            "tests/unit/test_core.py": TEST,
            "tests/helpers.py": "from shop import core\n\nBASE = core.price(2)\n",
        },
    ),
    "tests inside the package": (
        "src/shop/core.py",
        {
            "src/shop/__init__.py": "",
            "src/shop/tests/__init__.py": "",
            "src/shop/tests/test_core.py": "from ..core import price\n\n\ndef test_it():\n    assert price(1)\n",
        },
    ),
    "namespace package": (
        "src/acme/shop/core.py",
        {
            "src/acme/shop/__init__.py": INIT,
            "tests/__init__.py": "",
            "tests/test_core.py": "from acme.shop.core import price\nfrom acme.shop import core\n\nprice(core.price(1))\n",
        },
    ),
    "several packages in one repository": (
        "packages/shop/src/shop/core.py",
        {
            "packages/shop/src/shop/__init__.py": INIT,
            "packages/shop/tests/__init__.py": "",
            "packages/shop/tests/test_core.py": TEST,
            "packages/web/src/web/__init__.py": "",
            "packages/web/src/web/page.py": "from shop import price\n\n\ndef page():\n    return price(1)\n",
        },
    ),
    "lib folder": (
        "lib/shop/core.py",
        {
            "lib/shop/__init__.py": "",
            "lib/shop/cart.py": USE,
            "tests/__init__.py": "",
            "tests/test_core.py": TEST,
        },
    ),
    "python folder beside other languages": (
        "python/shop/core.py",
        {"python/shop/__init__.py": "", "python/tests/__init__.py": "", "python/tests/test_core.py": TEST},
    ),
    "scripts use the package": (
        "src/shop/core.py",
        {
            "src/shop/__init__.py": "",
            "scripts/report.py": "import shop.core\n\nprint(shop.core.price(3))\n",
            "tests/__init__.py": "",
        },
    ),
    "relative imports from a parent": (
        "src/shop/core.py",
        {
            "src/shop/__init__.py": "",
            "src/shop/web/__init__.py": "",
            "src/shop/web/page.py": "from ..core import price\nfrom .. import core\n\nprice(core.price(1))\n",
            "tests/__init__.py": "",
        },
    ),
    "module imported under another name": (
        "src/shop/core.py",
        {
            "src/shop/__init__.py": "",
            "tests/__init__.py": "",
            "tests/test_core.py": "import shop.core as c\nfrom shop import core as d\n\nassert c.price(1) == d.price(1)\n",
        },
    ),
    "passed on by star import": (
        "src/shop/core.py",
        {
            "src/shop/__init__.py": "from .core import *\n",
            "tests/__init__.py": "",
            "tests/test_core.py": "import shop\n\nassert shop.price(1) == 1\n",
        },
    ),
    "passed on through two packages": (
        "src/shop/api/core.py",
        {
            "src/shop/api/__init__.py": "from .core import price\n",
            "src/shop/__init__.py": "from .api import price\n",
            "tests/__init__.py": "",
            "tests/test_core.py": "from shop import price\n\nassert price(1) == 1\n",
        },
    ),
    "apps beside manage.py": (
        "shop/core.py",
        {
            "manage.py": "from site_settings import DEBUG\n",
            "site_settings.py": "DEBUG = True\n",
            "shop/__init__.py": "",
            "shop/views.py": "from shop.core import price\n\n\ndef view():\n    return price(1)\n",
            "shop/tests/__init__.py": "",
            "shop/tests/test_views.py": "from shop import core\n\nassert core.price(1) == 1\n",
        },
    ),
    "source folder configured for setuptools": (
        "code/shop/core.py",
        {
            "pyproject.toml": '[tool.setuptools.packages.find]\nwhere = ["code"]\n',
            "code/shop/__init__.py": "",
            "tests/__init__.py": "",
            "tests/test_core.py": TEST,
        },
    ),
    "path configured for pytest": (
        "app/core.py",
        {
            "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["app"]\n',
            "tests/__init__.py": "",
            "tests/test_core.py": "from core import price\n\nassert price(1) == 1\n",
        },
    ),
    "imports for type checkers and with a fallback": (
        "src/shop/core.py",
        {
            "src/shop/__init__.py": "",
            "src/shop/typed.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from shop.core import price\n",
            "src/shop/safe.py": "try:\n    from shop.core import price\nexcept ImportError:\n    raise\n\nprice(1)\n",
            "tests/__init__.py": "",
        },
    ),
    "conftest and a decoy": (
        "src/shop/core.py",
        {
            "src/shop/__init__.py": "",
            "conftest.py": "import pytest\nfrom shop.core import price\n\n\n@pytest.fixture\ndef one():\n    return price(1)\n",
            "tests/__init__.py": "",
        },
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_caller_follows_a_rename(layout: str, tmp_path: Path) -> None:
    home, others = LAYOUTS[layout]
    files = {home: CORE, **others, "decoy.py": "def other(price):\n    return price\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    work = Refactoring(tmp_path)
    plan = work.rename(home, CORE.index("price"), "cost")
    after = {name: apply_edits(text, plan.edits.get(name, ())) for name, text in files.items()}
    work.close()
    assert after.pop("decoy.py") == files["decoy.py"]
    assert {name: text for name, text in after.items() if "price" in text} == {}
    assert after[home] == CORE.replace("price", "cost")


def test_a_rename_that_would_leave_an_import_behind_is_refused(tmp_path: Path) -> None:
    """How the module is found is only known at run time."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "shop").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("")
    (tmp_path / "tools" / "shop" / "__init__.py").write_text("")
    (tmp_path / "tools" / "shop" / "core.py").write_text(CORE)
    use = "import sys\n\nsys.path.append('tools')\nfrom shop.core import price\n\nprice(1)\n"
    (tmp_path / "use.py").write_text(use)
    work = Refactoring(tmp_path)
    with pytest.raises(InputError, match=r"use\.py also import price"):
        work.rename("tools/shop/core.py", 4, "cost")
    work.close()
