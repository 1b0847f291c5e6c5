"""`make figures`: BENCHMARKS.md from the results in bench/results, one table a feature.

`bench/figures.toml` says which figures a feature shows, with their peers and targets; a figure that misses
its target is marked. A row without a result is an error that names it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.record import RESULTS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "BENCHMARKS.md"
CATALOGUE = Path(__file__).with_suffix(".toml")
LONGEST = 250  # lines of the page
HEAD = """# Benchmarks

Every row comes from `bench/results/`, where benchmarks write their figures; `make figures` makes this page.
Figures are of the current version and weights. **missed** marks what falls short of its target.
Times depend on the machine; ratios were measured within one run. Earlier figures and explanations are in
[log/benchmarks-2026-11.md](log/benchmarks-2026-11.md).
"""


def write_page(catalogue: Mapping[str, Any], results: Path) -> str:
    """The page. Raises KeyError where a row names a result or a figure that is not there."""
    lines = [HEAD]
    for feature in catalogue["feature"]:
        lines.append(f"## {feature['title']}\n")
        if "about" in feature:
            lines.append(f"{feature['about']}\n")
        lines += [
            "| metric | ours | peer | target | machine | date | command |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [_table_row(row, results) for row in feature["row"]]
        lines.append("")
    page = "\n".join(lines)
    if page.count("\n") > LONGEST:
        raise ValueError(f"the page has {page.count(chr(10))} lines; leave rows out until it has {LONGEST}")
    return page


def _table_row(row: Mapping[str, Any], results: Path) -> str:
    path = results / f"{row['result']}.json"
    if not path.is_file():
        raise KeyError(f"{row['metric']}: there is no {path.name}")
    result = json.loads(path.read_text(encoding="utf-8"))
    figures = result["figures"]
    cells = [
        row["metric"],
        _fill(row["ours"], figures),
        _fill(row.get("peer", ""), figures),
        _target(row, figures),
        result["machine"],
        result["date"],
        f"`{result['command']}`",
    ]
    return f"| {' | '.join(cells)} |"


def _fill(template: str, figures: Mapping[str, Any]) -> str:
    """`template` with every {name} replaced by its figure."""
    return re.sub(r"\{([^}]+)\}", lambda found: _shown(figures[found[1]]), template)


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _target(row: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    """The target, and whether the row's first figure misses it."""
    at_least, at_most = row.get("at_least"), row.get("at_most")
    if at_least is None and at_most is None:
        return ""
    value = figures[re.findall(r"\{([^}]+)\}", row["ours"])[0]]
    missed = value < at_least if at_least is not None else value > at_most
    text = f"at least {_shown(at_least)}" if at_least is not None else f"at most {_shown(at_most)}"
    return f"{text}, **missed**" if missed else text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page differs")
    given = parser.parse_args()
    page = write_page(tomllib.loads(CATALOGUE.read_text(encoding="utf-8")), RESULTS)
    if given.check:
        return 0 if PAGE.read_text(encoding="utf-8") == page else 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
