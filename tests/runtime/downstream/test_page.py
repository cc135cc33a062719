"""Every row of docs/in-other-programs.md has one test, and every test its row."""

import re
from pathlib import Path

from support import ROOT


def test_every_row_has_a_test():
    page = ROOT / "docs" / "in-other-programs.md"
    lines = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    told = [cells[0] for cells in lines if not cells[0].startswith("what a program")]
    assert all(len(cells) == 3 for cells in lines) and len(set(told)) == len(told) > 40
    source = "\n".join(p.read_text() for p in sorted(Path(__file__).parent.glob("test_*.py")))
    tested = [eval(text) for text in re.findall(r"(?:pytest\.mark\.row|asking)\(\s*('[^'\n]+'|\"[^\"\n]+\")", source)]
    assert sorted(tested) == sorted(told)
    for cells in lines[1:]:
        for cell in cells[1:]:
            assert cell.startswith(("works", "evaluates; ", "refused", "the same", "see ", "without", "in a")), cell
