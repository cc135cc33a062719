"""Which tests `make test` leaves out is written down, and a name that nothing has any more must not leave out more."""

import pytest
import suites


def test_a_word_that_is_in_no_cases_id_ends_the_run(monkeypatch):
    """An id that changed took its case out of `make test`, where nobody would miss it."""
    monkeypatch.setattr(suites, "FEW", {"a/test_b.py::test_c": ("[1]", "[2]")})
    cases = [f"a/test_b.py::test_c[{n}]" for n in range(4)]
    suites.check_few(cases)
    suites.check_few(["a/test_d.py::test_e[1]"])  # the file is not in this run
    with pytest.raises(pytest.UsageError, match=r"no case of a/test_b.py::test_c has \[2\]"):
        suites.check_few(cases[:2])
    with pytest.raises(pytest.UsageError, match=r"leaves no case of a/test_b.py::test_cold$"):
        suites.check_few([*cases, "a/test_b.py::test_cold[x]"])  # one name begins with the other
