"""A second reader, written from pack/FORMAT.md alone, with nothing of moepack and no array library. Slow and plain.

It is how the suite knows that the format document suffices. Numbers come out as Python floats and integers.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path


def read_manifest(root: Path) -> dict:
    raw = (root / "manifest.json").read_bytes()
    document = json.loads(raw)
    digest = document.pop("sha256")

    def canonical(value: object) -> bytes:
        return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode()

    assert hashlib.sha256(canonical(document)).hexdigest() == digest
    assert canonical({**document, "sha256": digest}) == raw
    return document


def read_extent(root: Path, manifest: dict, version: str, layer: int, expert: int) -> bytes:
    return _extent(root, manifest, f"experts/{version}/layer-{layer:03d}.safetensors", f"expert.{expert:05d}")


def read_dense_extent(root: Path, manifest: dict, version: str, number: int) -> bytes:
    layer = manifest["dense"]["matrices"][number]["layer"]
    file = "head" if layer is None else f"layer-{layer:03d}"
    return _extent(root, manifest, f"dense/{version}/{file}.safetensors", f"dense.{number:05d}")


def _extent(root: Path, manifest: dict, name: str, tensor: str) -> bytes:
    entry = manifest["files"][name]
    with (root / name).open("rb") as f:
        head = f.read(entry["header_size"])
        assert hashlib.sha256(head).hexdigest() == entry["header_sha256"]
        header = json.loads(head[8:])
        begin, end = header[tensor]["data_offsets"]
        f.seek(len(head) + begin)
        data = f.read(end - begin)
    place = sorted(header.keys() - {"__metadata__"}).index(tensor)
    assert hashlib.sha256(data).hexdigest() == header["__metadata__"]["sha256"].split(",")[place]
    assert (len(head) + begin) % 4096 == 0 and len(data) % 4096 == 0
    return data


def bf16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def affine_values(extent: bytes, layer: dict, version: dict) -> list[list[list[float]]]:
    bits, size = version["bits"], version["group_size"]
    at, out = 0, []

    def take(item: int, count: int) -> list[int]:
        nonlocal at
        at = -(-at // 64) * 64
        values = struct.unpack_from(f"<{count}{ {1: 'B', 2: 'H', 4: 'I'}[item] }", extent, at)
        at += item * count
        return list(values)

    def blocks(item: int, rows: int, n: int) -> list[list[int]]:
        flat = take(item, -(-rows // 16) * n * 16)
        return [[flat[(r // 16 * n + i) * 16 + r % 16] for i in range(n)] for r in range(rows)]

    for m in layer["matrices"]:
        rows, cols = m["rows"], m["cols"]
        groups = -(-cols // size)
        codes = [[0] * cols for _ in range(rows)]
        shift = 0
        for p in {8: [8], 4: [4], 3: [2, 1], 2: [2], 1: [1]}[bits]:
            plane = blocks(4, rows, -(-cols * p // 32))
            for r in range(rows):
                string = sum(w << 32 * i for i, w in enumerate(plane[r]))
                for c in range(cols):
                    codes[r][c] |= (string >> c * p & (1 << p) - 1) << shift
            shift += p
        scale = [[bf16(b) for b in row] for row in blocks(2, rows, groups)]
        if version["zero"] == "stored":
            zero = [[z / 2 ** (8 - bits) for z in row] for row in blocks(1, rows, groups)]
        else:
            zero = [[(2**bits - 1) / 2] * groups] * rows
        if m["bias"]:
            take(2, rows)
        out.append(
            [[scale[r][c // size] * (codes[r][c] - zero[r][c // size]) for c in range(cols)] for r in range(rows)]
        )
    return out


def lossless_bits(extent: bytes, layer: dict) -> list[list[int]]:
    out = []
    for i, m in enumerate(layer["matrices"]):
        offset, size, _, _ = struct.unpack_from("<4I", extent, 16 * i)
        out.append(coded_matrix(extent[offset : offset + size], m["rows"] * m["cols"]))
    return out


def coded_matrix(data: bytes, weights: int) -> list[int]:
    plane, exponents = coded(data, weights, weights)
    return [(p & 0x80) << 8 | e << 7 | p & 0x7F for p, e in zip(plane, exponents, strict=True)]


def coded_codes(data: bytes, codes: int) -> bytes:
    plane, exponents = coded(data, codes, -(-codes // 2))
    nibbles = [plane[i // 2] >> 4 * (i % 2) & 15 for i in range(codes)]
    return bytes((x & 8) << 4 | e << 3 | x & 7 for x, e in zip(nibbles, exponents, strict=True))


def fp8_values(extent: bytes, layer: dict, version: dict) -> list[list[list[float]]]:
    """The values of `fp8`, from the extent in its file; a product of two floats of Python is not rounded to float32."""
    out = []
    for i, m in enumerate(layer["matrices"]):
        rows, cols, size = m["rows"], m["cols"], version["group_size"]
        blocks, words, groups = -(-rows // 16), -(-cols // 4), -(-cols // size)
        offset, length, rest, beside = struct.unpack_from("<4I", extent, 16 * i)
        plane = extent[offset : offset + length]
        if length < 64 * blocks * words:
            plane = coded_codes(plane, 64 * blocks * words)
        scale = struct.unpack_from(f"<{blocks * groups}f", extent, rest)
        assert beside == (-(-len(scale) * 4 // 64) * 64 + 2 * rows if m["bias"] else len(scale) * 4)
        out.append(
            [
                [
                    e4m3(plane[4 * ((r // 16 * words + c // 4) * 16 + r % 16) + c % 4])
                    * scale[r // 16 * groups + c // size]
                    for c in range(cols)
                ]
                for r in range(rows)
            ]
        )
    return out


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if code & 128 else value


def coded(data: bytes, weights: int, plane_size: int) -> tuple[bytes, list[int]]:
    """The last part and the exponents: of BF16 weights, or, where `plane_size` is half of them, of FP8 codes."""
    n, tiles, words, n_patches = struct.unpack_from("<4I", data, 0)
    assert n == weights
    exponent, length = data[16:32], data[32:48]
    at = 48
    parts = []
    for count in (tiles + 1, tiles + 1, n_patches, words):
        parts.append(struct.unpack_from(f"<{count}I", data, at))
        at += 4 * count
    tile_start, patch_start, patches, stream = parts
    plane = data[at:]
    assert len(plane) == plane_size
    symbol_of, word = {}, 0
    for bits in range(1, 9):
        for s in range(16):
            if length[s] == bits:
                symbol_of[format(word, f"0{bits}b")] = s
                word += 1
        word <<= 1
    exponents = [0] * n
    for t in range(tiles):
        count = min(8192, n - 8192 * t)
        body = stream[tile_start[t] : tile_start[t + 1]]
        if body[0] >> 16 == 1:
            raw = b"".join(struct.pack("<I", w) for w in body[1:])
            if plane_size < n:
                raw = bytes(b >> shift & 15 for b in raw for shift in (0, 4))
            exponents[8192 * t : 8192 * t + count] = raw[:count]
            continue
        base = body[0] & 0xFFFF
        wide = body[0] >> 16 == 2
        deltas = struct.unpack(
            "<32H" if wide else "<32B", struct.pack("<16I" if wide else "<8I", *body[1 : 17 if wide else 9])
        )
        bits = "".join(format(w, "032b") for w in body[17 if wide else 9 :])
        start = 0
        quads = -(-count // 128)
        for lane in range(32):
            end = start + base + deltas[lane]
            at = start
            for q in range(quads):
                for k in range(4):
                    code = ""
                    while code not in symbol_of:
                        code += bits[at]
                        at += 1
                    position = 4 * (32 * q + lane) + k
                    if position < count:
                        exponents[8192 * t + position] = exponent[symbol_of[code]]
            assert at == end
            start = end
        for patch in patches[patch_start[t] : patch_start[t + 1]]:
            exponents[8192 * t + (patch & 0xFFFF)] = patch >> 16
    return plane, exponents
