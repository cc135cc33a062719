"""Texts and chats out of files and Hub data sets, document by document.

A row of a table is a document, and so is a .md. A .txt is as many as its separators say, and a table whose rows are the
lines of WikiText as many as its titles (`split_lines`). Decides nothing about tokens.
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

_KINDS = (".txt", ".md", ".jsonl", ".json", ".parquet")
_ENDS = ("<|endoftext|>", "\f")  # a line of either alone ends a document
_TITLE = re.compile(r" = (?!=).*[^=\s] = \s*")  # WikiText's of an article; its sections have more than one =


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation, as chat templates take it.

    Attributes:
        messages: each with "role" and "content", and "tool_calls" and the like where it has them.
        tools: descriptions of the tools that the model was offered.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


Document = str | Conversation


def check_source(source: str) -> None:
    """See that a source is there, before anything is done with it.

    Raises:
        InputError: when it is neither a file nor a data set that can be had.
    """
    name = source.partition(":")[0]
    if Path(source).suffix in _KINDS:
        if not Path(source).is_file():
            raise InputError(f"{source}: no such file")
    elif not Path(name).exists():
        on_hub(name, "README.md", instead="no such file", kind="dataset")


def documents(source: str) -> Iterator[Document]:
    """The documents of a source, in order, as they are read.

    Args:
        source: a .txt, .md, .jsonl, .json or .parquet file (rows need a column "text", or "messages" as chats have
            them), or a data set of the Hub or in a directory, as NAME[:CONFIG[:SPLIT[:COLUMN]]] ("train" and "text"
            where they are not named), which is streamed.

    Raises:
        InputError: for a source that cannot be read, or rows without text.
        MissingExtraError: without `datasets`, for a .parquet or a data set.
    """
    check_source(source)
    path, column = Path(source), "text"
    try:
        if path.suffix == ".md":
            yield path.read_text(encoding="utf-8")
        elif path.suffix == ".txt":
            with path.open(encoding="utf-8") as lines:
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
        local = path.suffix in _KINDS
        hint = "" if local else " (not a .txt, .jsonl, .json or .parquet file, so taken for a Hub data set)"
        raise InputError(f"{source}: cannot be read{hint}: {what}") from None


def split_lines(lines: Iterable[str]) -> Iterator[str]:
    """Lines of a text, with their ends, as documents; a text without separators is one.

    A line that holds nothing but <|endoftext|>, or a form feed, ends a document and is dropped. A title as WikiText
    writes those of articles (" = Title = ", blank lines around it) begins one. What is only white space is none.
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
    """Rows as they are, unless the first that is not blank is an article's title: they are lines of articles then."""
    rows, blank = iter(rows), list[Document]()
    for row in rows:
        if row == "":
            blank.append(row)
        elif isinstance(row, str) and _TITLE.fullmatch(row):
            yield from split_lines(str(r) if str(r).endswith("\n") else f"{r}\n" for r in itertools.chain([row], rows))
        else:
            yield from itertools.chain(blank, [row], rows)


def _document(source: str, row: Any, column: str) -> Document:
    if not isinstance(row, dict):
        raise InputError(f"{source}: its rows are no objects with a column {column!r}")
    value = row.get(column)
    if column == "text" and not isinstance(value, str):
        value = row.get("messages")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(m, dict) for m in value):
        tools = row.get("tools")
        if isinstance(tools, str):  # as many data sets keep them
            tools = json.loads(tools) if tools.strip() else None
        return Conversation(value, tools or None)
    raise InputError(f"{source}: rows have no {column!r} of text; they have {', '.join(sorted(map(str, row)))}")


def _json_rows(path: Path) -> Iterator[Any]:
    """Rows by `json`, not by Arrow: it would give every tool call the arguments of all others."""
    with path.open(encoding="utf-8-sig") as f:
        if path.suffix == ".json":
            first = next((line for line in f if line.strip()), "")
            f.seek(0)
            if not _is_json(first):  # one value over several lines
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


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _table(source: str) -> tuple[Any, str]:
    """The rows of a .parquet or of a data set, streamed, and the column that was asked for."""
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "build") from None
    if Path(source).suffix == ".parquet":
        return datasets.load_dataset("parquet", data_files=source, split="train", streaming=True), "text"
    name, config, split, column = (*source.split(":"), "", "", "")[:4]
    data = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    return data, column or "text"


def _given(value: Any) -> Any:
    """A row without the fields that are null: Arrow gives every object those of all others."""
    if isinstance(value, dict):
        return {k: _given(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_given(v) for v in value]
    return value
