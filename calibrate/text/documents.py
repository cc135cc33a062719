"""Read texts and chats from files and Hub data sets, document by document.

A table's row and a .md file are each a document. Separators split a .txt file, and titles split tables whose rows are
the lines of WikiText (`split_lines`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepack.pack.errors import InputError, MissingExtraError
from moepack.pack.hub_name import on_hub

ROWS = 1024  # of a .parquet that are read at a time
_KINDS = (".txt", ".md", ".jsonl", ".json", ".parquet")
_ENDS = ("<|endoftext|>", "\f")  # a line of either alone ends a document
_TITLE = re.compile(r" = (?!=).*[^=\s] = \s*")  # an article's title in WikiText; section titles have more than one =


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation for chat templates."""

    messages: list[dict[str, Any]]  # objects with "role", "content", and optional fields such as "tool_calls"
    tools: list[Any] | None = None  # descriptions of the tools that the model was offered


Document = str | Conversation


def check_source(source: str) -> None:
    """Check that a source exists. Raises InputError unless it is a file or an accessible data set."""
    name = source.partition(":")[0]
    if Path(source).suffix in _KINDS:
        if not Path(source).is_file():
            raise InputError(f"{source}: no such file")
    elif Path(source).is_file():
        known = f"{', '.join(_KINDS[:-1])} or {_KINDS[-1]}"
        raise InputError(f"{source}: a file of text is a {known}: convert or rename it")
    elif not Path(name).exists():
        on_hub(name, "README.md", instead="no such file", kind="dataset")


def documents(source: str) -> Iterator[Document]:
    """Yield the documents of a source in order.

    A source is a .txt, .md, .jsonl, .json or .parquet file whose rows have a column "text" or "messages"; or a data set
    of the Hub or in a directory, NAME[:CONFIG[:SPLIT[:COLUMN]]], by default of split "train" and column "text", read as
    a stream. Raises InputError for a source that cannot be read, or rows without text, and MissingExtraError for a
    .parquet or a data set without `datasets`.
    """
    check_source(source)
    path = Path(source)
    column = "text"
    try:
        if path.suffix == ".md":
            yield path.read_text(encoding="utf-8-sig")
        elif path.suffix == ".txt":
            with path.open(encoding="utf-8-sig") as lines:
                yield from split_lines(lines)
        elif path.suffix in (".json", ".jsonl"):
            for row in _json_rows(path):
                yield _document(source, row, column)
        else:
            data, column = _table(source)
            yield from _articles(_document(source, _given(row), column) for row in data)
    except (InputError, MissingExtraError):
        raise
    except Exception as error:  # `datasets` raises its own, pyarrow's, the Hub's and the operating system's
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        taken = "a data set of the Hub"
        if path.suffix in _KINDS:
            taken = f"a {path.suffix} file"
        elif Path(source.partition(":")[0]).exists():
            taken = "a data set's directory (name one of its files)"
        raise InputError(f"{source}: cannot be read as {taken}: {what}") from None


def split_lines(lines: Iterable[str]) -> Iterator[str]:
    """Group lines, which keep their ends, into documents.

    A line of only <|endoftext|> or a form feed ends a document and is dropped. An article's title in WikiText
    (" = Title = " between blank lines) begins one. Documents of only white space are dropped.
    """
    part: list[str] = []
    before = ""
    ahead, lines = itertools.tee(lines)
    next(ahead, None)
    for line, after in zip(lines, itertools.chain(ahead, [""]), strict=False):
        ends = line.strip(" \t\r\n") in _ENDS
        begins = not before.strip() and not after.strip() and _TITLE.fullmatch(line) is not None
        if ends or begins:
            if (text := "".join(part)).strip():
                yield text
            part.clear()
        if not ends:
            part.append(line)
        before = line
    if (text := "".join(part)).strip():
        yield text


def _articles(rows: Iterable[Document]) -> Iterator[Document]:
    """Yield rows as they are; if the first that is not blank is an article's title, join them as lines."""
    rows = iter(rows)
    blank = list[Document]()
    for row in rows:
        if row == "":
            blank.append(row)
        elif isinstance(row, str) and _TITLE.fullmatch(row):
            yield from split_lines(str(r) if str(r).endswith("\n") else f"{r}\n" for r in itertools.chain([row], rows))
        else:
            yield from itertools.chain(blank, [row], rows)


def _document(source: str, row: object, column: str) -> Document:
    if not isinstance(row, dict):
        raise InputError(f"{source}: its rows are not objects with a column {column!r}")
    value = row.get(column)
    if column == "text" and not isinstance(value, str):
        value = row.get("messages")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(m, dict) for m in value):
        tools = row.get("tools")
        if isinstance(tools, str):  # many data sets store them as text
            tools = json.loads(tools) if tools.strip() else None
        return Conversation(value, tools or None)
    raise InputError(f"{source}: rows have no {column!r} of text; they have {', '.join(sorted(map(str, row)))}")


def _json_rows(path: Path) -> Iterator[object]:
    """Yield rows, read with the json module: Arrow would give each tool call the arguments of all others."""
    with path.open(encoding="utf-8-sig") as f:
        if path.suffix == ".json":
            first = next((line for line in f if line.strip()), "")
            f.seek(0)
            try:
                json.loads(first)
            except ValueError:  # one value over several lines
                whole = json.load(f)
                yield from whole if isinstance(whole, list) else [whole]
                return
        for number, line in enumerate(f, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from None
                # A file of one line may be a list of all rows.
                yield from row if isinstance(row, list) and path.suffix == ".json" else [row]


def _table(source: str) -> tuple[Iterable[object], str]:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "build") from None
    if Path(source).suffix == ".parquet":
        given = {"data_files": source, "split": "train", "streaming": True}
        return datasets.load_dataset("parquet", batch_size=ROWS, **given), "text"  # else a file without rows has none
    name, config, split, column = (*source.split(":"), "", "", "")[:4]
    data = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    return data, column or "text"


def _given(value: object) -> object:
    """Drop a row's null fields: Arrow gives each object the fields of all others."""
    if isinstance(value, dict):
        return {k: _given(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_given(v) for v in value]
    return value
