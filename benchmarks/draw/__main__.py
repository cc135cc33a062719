"""Bring the pictures and the tables of the documentation up to date.

python -m benchmarks.draw [--out DIR] [--png]    the pictures, into docs/images/ as SVG, or elsewhere
python -m benchmarks.draw --tables               the tables, into the documents (benchmarks/tables/)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.tables import with_tables
from benchmarks.tables.common import DOCUMENTS

from . import IMAGES, draw


def main() -> None:
    """Parse arguments, draw or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES, help="where pictures go")
    parser.add_argument("--png", action="store_true", help="PNG, to look at")
    parser.add_argument("--tables", action="store_true", help="write the tables instead")
    args = parser.parse_args()
    if args.tables:
        for path in DOCUMENTS:
            path.write_text(with_tables(path.read_text(), path))
        return
    for path in draw(args.out, args.png):
        print(path)


if __name__ == "__main__":
    main()
