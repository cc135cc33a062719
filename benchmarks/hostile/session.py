"""Cases in processes of their own, with bounds of time and memory, and what became of them."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import random
import resource
import shutil
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.common import Row

from .edits import Subject

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

BATCH = 500
PATIENCE = 10
MEMORY = 2 << 30


class Hang(BaseException):
    """A case took too long."""


def _late(*_: object) -> None:
    raise Hang


def run(subjects: Sequence[Subject], first: int, count: int, place: Path, results: Connection) -> None:
    """Cases from `first` on, in a process of their own."""
    torch.set_num_threads(1)  # the parent's other threads are not in a forked child, which would end at their pool
    resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[0],) * 2)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    signal.signal(signal.SIGALRM, _late)
    bases = [
        {str(p.relative_to(base)): p.read_bytes() for p in sorted(base.rglob("*")) if p.is_file()}
        for base in (place / "base" / subject.name for subject in subjects)
    ]
    out = place / "out"
    for number in range(first, first + count):
        chance = random.Random(number)
        which = number % len(subjects)
        subject = subjects[which]
        case = place / f"case-{subjects[which].name}"
        made = subject.case(bases[which], chance, place / "outside" / "file")
        kind = chance.choices([*subject.kinds], [*subject.kinds.values()])[0]
        results.send(("begin", number, kind.__name__))
        kind(made)
        writes = chance.random() < 0.05
        with contextlib.suppress(ValueError, OverflowError):  # what no file can hold
            made.write(case)
        became = _attempt(subject, case, out, writes)
        if out.exists() or writes:
            left = [p for p in place.iterdir() if p.name.partition("-")[0] not in ("base", "case", "out", "outside")]
            if left:
                became = f"left {left[0].name}"
            shutil.rmtree(out, ignore_errors=True)
        results.send(("end", number, became))
    results.send(("over", 0, ""))


def _attempt(subject: Subject, case: Path, out: Path, writes: bool) -> str:
    signal.alarm(PATIENCE)
    try:
        return subject.attempt(case, out, writes)
    except Hang:
        return f"took more than {PATIENCE} s"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
    finally:
        signal.alarm(0)


def outside(work: Path) -> list[tuple[str, int, str]]:
    """Everything that no case may change."""
    found = [p for name in ("base", "outside") for p in sorted((work / name).rglob("*")) if p.is_file()]
    return [(str(p), p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest()) for p in found]


@dataclass
class Found:
    """What became of cases."""

    by_kind: dict[str, Counter[str]]
    by_subject: dict[str, Counter[str]]
    wrong: list[str]  # a line for each case that did something else than open or be refused

    def note(self, number: int, subject: Subject, kind: str, what: str) -> None:
        """Count a case."""
        right = what in ("opened", "refused")
        for counts in (self.by_kind[kind], self.by_subject[subject.name]):
            counts[what if right else "wrong"] += 1
        self.wrong += [] if right else [f"case {number} ({subject.name}, {kind}): {what}"]

    def rows(self, name: str, counts: dict[str, Counter[str]]) -> list[Row]:
        """A row for each; `name` is the first column's."""
        return [
            {name: of, "cases": sum(c.values()), **{k: c[k] for k in ("opened", "refused", "wrong")}}
            for of, c in counts.items()
        ]


def hostile(subjects: Sequence[Subject], cases: int, first: int = 0) -> Found:
    """Make and use cases, of each subject in turn."""
    kinds = dict.fromkeys(kind.__name__ for subject in subjects for kind in subject.kinds)
    found = Found({k: Counter() for k in kinds}, {s.name: Counter() for s in subjects}, [])
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "base").mkdir()
        for subject in subjects:
            subject.make(work / "base" / subject.name)
            case = shutil.copytree(work / "base" / subject.name, work / f"case-{subject.name}")
            assert subject.attempt(case, work / "out", True) == "opened", subject.name
            shutil.rmtree(work / "out", ignore_errors=True)
        (work / "outside").mkdir()
        (work / "outside" / "file").write_bytes(b"not yours\n  ")
        before = outside(work)
        number = first
        while number < first + cases:
            number = _batch(subjects, number, min(first + cases, number + BATCH), work, found)
            if outside(work) != before:
                found.wrong.append(f"cases up to {number}: something outside was changed")
                before = outside(work)
    return found


def _batch(subjects: Sequence[Subject], number: int, end: int, work: Path, found: Found) -> int:
    """Cases from `number` on, in one process; returns the next."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(False)
    process = context.Process(target=run, args=(subjects, number, end - number, work, there))
    process.start()
    there.close()
    kind = ""
    try:
        while True:
            if not here.poll(3 * PATIENCE):  # it is in compiled code, where no signal reaches Python
                process.kill()
            said, at, what = here.recv()
            if said == "over":
                return end
            number = at
            if said == "begin":
                kind = what
            else:
                found.note(number, subjects[number % len(subjects)], kind, what)
    except EOFError:  # it is gone
        process.join()
        found.note(number, subjects[number % len(subjects)], kind, f"the process ended with {process.exitcode}")
        return number + 1
    finally:
        process.join()
