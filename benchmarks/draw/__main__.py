"""Bring the pictures, the tables and the recorded session of the documentation up to date.

python -m benchmarks.draw [--out DIR] [--png]    the pictures, into docs/images/ as SVG, or elsewhere
python -m benchmarks.draw --tables               the tables, into the documents (benchmarks/tables/)
python -m benchmarks.draw --session              the session, as a cast for asciinema and as SVG (session.py)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.tables import with_tables
from benchmarks.tables.common import DOCUMENTS

from . import IMAGES, draw
from .session import write


def main() -> None:
    """Parse arguments, draw or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES, help="where pictures go")
    parser.add_argument("--png", action="store_true", help="PNG, to look at")
    parser.add_argument("--tables", action="store_true", help="write the tables instead")
    parser.add_argument("--session", action="store_true", help="record the session instead")
    parser.add_argument("--bundle", type=Path, help="a bundle for the session; one is built without it")
    args = parser.parse_args()
    if args.session:
        write(args.out, args.bundle)
        return
    if args.tables:
        for path in DOCUMENTS:
            path.write_text(with_tables(path.read_text(), path))
        return
    for path in draw(args.out, args.png):
        print(path)


if __name__ == "__main__":
    main()
