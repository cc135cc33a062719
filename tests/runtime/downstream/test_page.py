"""Every row of docs/in-other-programs.md has one test, and every test its row."""

import re
from pathlib import Path


def test_every_row_has_a_test(page):
    source = "\n".join(p.read_text() for p in sorted(Path(__file__).parent.glob("test_*.py")))
    tested = [eval(text) for text in re.findall(r"(?:pytest\.mark\.row|asking)\(\s*('[^'\n]+'|\"[^\"\n]+\")", source)]
    assert sorted(tested) == sorted(page) and len(page) > 40
    for cell in (cell for cells in page.values() for cell in cells):
        assert cell.startswith(("works", "evaluates; ", "refused", "the same", "see ", "without", "in a")), cell
