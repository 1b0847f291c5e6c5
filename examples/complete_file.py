"""Complete code in a file with the embedded model: python examples/complete_file.py FILE LINE [MODEL]

The first run fetches and converts the model, which takes a while; later ones start at once.
"""

from __future__ import annotations

import sys
from pathlib import Path

from keystroke import complete, load_model


def main(file: str, line: str, name: str = "embedded") -> None:
    lines = Path(file).read_text(encoding="utf-8").splitlines(keepends=True)
    at = int(line)
    prefix = "".join(lines[:at]).rstrip("\n")
    suffix = "\n" + "".join(lines[at:])

    model = load_model(name)
    with model.engine, model.engine.session() as session:
        found = complete(model, session, prefix, suffix, max_tokens=64)
        sys.stdout.write(f"{found.text}\n")
        assert found.stats is not None
        sys.stderr.write(f"{found.stats.tokens} tokens, {found.stats.tokens_per_second:.0f} a second\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
