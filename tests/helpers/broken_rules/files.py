"""Edits of files as a whole: links, pipes, folders, files that are not there, are short or are no JSON."""

import contextlib
import os
import shutil
import socket
from pathlib import Path

from hostile_edits import Victim

from .names import CONFIG, DENSE, MANIFEST, Q8, TABLES, W4, Do


def linked(name: str, target: str) -> Do:
    return lambda v: v.replace(name, lambda p: p.symlink_to(target))


def to_itself(name: str, elsewhere: str) -> Do:
    """A link to what stood there, moved to another name in the bundle's own directory or above."""

    def edit(v: Victim):
        moved = v.path / elsewhere
        if moved.is_dir():
            shutil.rmtree(moved)
        shutil.copytree(v.path / name, moved) if (v.path / name).is_dir() else shutil.copyfile(v.path / name, moved)
        v.replace(name, lambda p: p.symlink_to(moved))

    return edit


def listening(path: Path):
    with socket.socket(socket.AF_UNIX) as s, contextlib.chdir(path.parent):
        s.bind(path.name)


def longer(name: str, by: int) -> Do:
    def edit(v: Victim):
        data = (v.path / name).read_bytes()
        v.write(name, data + bytes(by) if by > 0 else data[:by])

    return edit


FILES: dict[str, tuple[Do, str]] = {
    "a link out": (linked(CONFIG, "/etc/passwd"), "link"),
    "a link to nowhere": (linked(CONFIG, "nowhere"), "link"),
    "a link to itself": (linked(CONFIG, CONFIG), "link"),
    "a link in the bundle": (to_itself(CONFIG, ".config"), "link"),
    "a layer file that is a link": (to_itself(W4, "../w4"), "link"),
    "a folder that is a link": (to_itself("experts/w4", "../folder"), "link"),
    "all experts behind a link": (to_itself("experts", "../all"), "link"),
    "the manifest a link": (to_itself(MANIFEST, ".manifest"), "link"),
    "the manifest a pipe": (lambda v: v.replace(MANIFEST, os.mkfifo), "file-type"),
    "the manifest a folder": (lambda v: v.replace(MANIFEST, Path.mkdir), "file-type"),
    "the config a pipe": (lambda v: v.replace(CONFIG, os.mkfifo), "file-type"),
    "the config a socket": (lambda v: v.replace(CONFIG, listening), "file-type"),
    "a layer file a pipe": (lambda v: v.replace(W4, os.mkfifo), "file-type"),
    "a layer file a folder": (lambda v: v.replace(W4, Path.mkdir), "file-type"),
    "no config": (lambda v: v.replace(CONFIG, str), "missing"),
    "no tables": (lambda v: v.replace(TABLES, str), "missing"),
    "part of a version": (lambda v: v.replace(W4, str), "missing"),
    "no version": (lambda v: v.replace("experts", str), "missing"),
    "part of a version of dense matrices": (lambda v: v.replace(Q8, str), "missing"),
    "no version of dense matrices": (lambda v: v.replace("dense", str), "missing"),
    "a file of dense matrices that is a link": (to_itself(Q8, "../q8"), "link"),
    "a folder of dense matrices that is a link": (to_itself("dense/w8", "../folder8"), "link"),
    "a file of dense matrices a pipe": (lambda v: v.replace(Q8, os.mkfifo), "file-type"),
    "a short file": (longer(W4, -4096), "size"),
    "a long file": (longer(DENSE, 1), "size"),
    "a byte of the config": (lambda v: v.write(CONFIG, (v.path / CONFIG).read_bytes().replace(b"q", b"Q")), "digest"),
    "a byte of the tables": (
        lambda v: v.write(TABLES, (d := (v.path / TABLES).read_bytes())[:-1] + bytes([d[-1] ^ 1])), "digest"
    ),
    "a config that is no JSON": (lambda v: v.rewrite(CONFIG, b"{"), "json"),
    "a config that is a list": (lambda v: v.rewrite(CONFIG, b"[]"), "value"),
    "a config of another quantiser": (
        lambda v: v.rewrite(CONFIG, b'{"quantization_config": {"quant_method": "gptq"}}'), "value"
    ),
}  # fmt: skip
