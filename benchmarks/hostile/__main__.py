"""Hostile bundles and released checkpoints: what opening, checking, reading and shrinking one does with a manifest,
headers, extents, tables, settings and files that somebody made to break it.

    python -m benchmarks.hostile [--cases 100000] [--first 0] [--json FILE]

Case N is made from its number alone: `--first N --cases 1` makes it again. Every case changes a small whole bundle or
checkpoint, of each format in turn, in one to three places, and mostly signs it again, so that what is behind the
digests is reached. It may open or be refused by an error of moepack's own (or of the file system). Anything else
counts: another exception, ten seconds, two gigabytes, the end of the process, a byte changed outside the directory that
was named, and of a checkpoint that opens, codes that stand for other values than moepack decodes.
"""

from benchmarks.common import Target, arguments, finish, show

from . import bundles, checkpoints
from .session import hostile


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, help="100,000 without it, or 2,000 with --quick")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    options = parser.parse_args()
    subjects = (*bundles.SUBJECTS, *checkpoints.SUBJECTS)
    found = hostile(subjects, options.cases or (2000 if options.quick else 100_000), options.first)
    for line in found.wrong[:50]:
        print(line)
    targets = [Target("cases that neither opened nor were refused", len(found.wrong), 0, "lower")]
    formats = found.rows("format", found.by_subject)
    show("Hostile bundles and checkpoints, by format", formats)
    rows = found.rows("changed", found.by_kind)
    finish("By what is changed", rows, targets, options.json, {"formats": formats})


if __name__ == "__main__":
    main()
