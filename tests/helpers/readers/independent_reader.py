"""A second reader, written from pack/FORMAT.md alone, with nothing of moepack and no array library. Slow and plain.

It is how the suite knows that the format document suffices. Numbers come out as Python floats and integers.
"""

import hashlib
import json
import struct
from pathlib import Path


def read_manifest(root: Path) -> dict:
    raw = (root / "manifest.json").read_bytes()
    document = json.loads(raw)
    digest = document.pop("sha256")

    def canonical(value) -> bytes:
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


def f32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def fp16(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def e8m0(bits: int) -> float:
    assert bits != 255
    return 2.0 ** (bits - 127)


def e4m3(bits: int) -> float:
    assert bits & 127 != 127
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -size if bits & 128 else size


def e2m1(bits: int) -> float:
    size = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[bits & 7]
    return -size if bits & 8 else size


class Sections:
    """Numbers of an extent, section after section."""

    def __init__(self, extent: bytes):
        self.extent, self.at = extent, 0

    def take(self, item: int, count: int) -> list[int]:
        self.at = -(-self.at // 64) * 64
        values = struct.unpack_from(f"<{count}{ {1: 'B', 2: 'H', 4: 'I'}[item] }", self.extent, self.at)
        self.at += item * count
        return list(values)

    def rows(self, item: int, rows: int, n: int) -> list[list[int]]:
        """[B, n, 16], as n numbers for each row."""
        flat = self.take(item, -(-rows // 16) * n * 16)
        return [[flat[(r // 16 * n + i) * 16 + r % 16] for i in range(n)] for r in range(rows)]

    def blocks(self, item: int, rows: int, n: int) -> list[list[int]]:
        """[B, n], likewise: every row of a block has its numbers."""
        flat = self.take(item, -(-rows // 16) * n)
        return [flat[r // 16 * n : (r // 16 + 1) * n] for r in range(rows)]

    def codes(self, bits: int, rows: int, cols: int) -> list[list[int]]:
        codes, shift = [[0] * cols for _ in range(rows)], 0
        for p in {8: [8], 5: [4, 1], 4: [4], 3: [2, 1], 2: [2], 1: [1]}[bits]:
            plane = self.rows(4, rows, -(-cols * p // 32))
            for r in range(rows):
                string = sum(w << 32 * i for i, w in enumerate(plane[r]))
                for c in range(cols):
                    codes[r][c] |= (string >> c * p & (1 << p) - 1) << shift
            shift += p
        return codes


def values(extent: bytes, layer: dict, version: dict) -> list[list[list[float]]]:
    """Weights of every matrix, [rows][cols], of any version but the lossless one."""
    sections, out = Sections(extent), []
    affine = version["encoding"].startswith(("affine", "trellis"))
    for i, m in enumerate(layer["matrices"]):
        own = version
        if version["encoding"].endswith("-mixed"):
            bits = version["bits"] + i
            own = {**version, "bits": bits, "zero": "midpoint" if bits == 1 else version["zero"]}
        out.append((affine_values if affine else released_values)(sections, m["rows"], m["cols"], own))
        if m["bias"]:
            sections.take(2, m["rows"])
    return out


def affine_values(sections: Sections, rows: int, cols: int, version: dict) -> list[list[float]]:
    bits, size = version["bits"], version["group_size"]
    groups = -(-cols // size)
    codes = sections.codes(bits, rows, cols)
    number = fp16 if version["encoding"] == "affine-fp16" else bf16
    if version.get("scale_bits") == 8:
        small = sections.rows(1, rows, groups)
        outer = [f32(b[0]) for b in sections.blocks(4, rows, 1)]
        scale = [[(1 + b % 32 / 32) * 2 ** (b // 32) * outer[r] for b in small[r]] for r in range(rows)]
    else:
        scale = [[number(b) for b in row] for row in sections.rows(2, rows, groups)]
    if version["encoding"].startswith("trellis"):
        codes = [[level(row[max(0, c - 7) : c + 1], bits) for c in range(cols)] for row in codes]
        zero = [[217] * groups] * rows
    elif version["zero"] == "stored":
        zero = [[z / 2 ** (8 - bits) for z in row] for row in sections.rows(1, rows, groups)]
    else:
        zero = [[2 ** (bits - 1) if version["zero"] == "symmetric" else (2**bits - 1) / 2] * groups] * rows
    return [[scale[r][c // size] * (codes[r][c] - zero[r][c // size]) for c in range(cols)] for r in range(rows)]


def level(codes: list[int], bits: int) -> int:
    """Of a column, from the codes of at most seven columns before it and its own."""
    last = list(reversed(codes))
    state = sum((code % 4) * 2 ** (14 - 2 * j) for j, code in enumerate(last))
    if bits == 3:
        state ^= sum((code // 4) * 2 ** (7 - j) for j, code in enumerate(last))
    p = (state * 26059).to_bytes(4, "little")
    return (p[0] + p[2] + 1) // 2 + (p[1] + p[3] + 1) // 2


def released_values(sections: Sections, rows: int, cols: int, version: dict) -> list[list[float]]:
    """Products as float32 has them: a float64 holds each exactly before it is rounded."""
    name, size = version["name"], version["group_size"] or cols
    groups = -(-cols // size)
    code = e2m1 if version["bits"] == 4 else e4m3
    codes = [[code(b) for b in row] for row in sections.codes(version["bits"], rows, cols)]
    stored = (sections.blocks if name == "fp8" else sections.rows)(4 if name.startswith("fp8") else 1, rows, groups)
    number = {"fp8": f32, "fp8row": f32, "nvfp4": e4m3}.get(name, e8m0)
    scale = [[number(b) for b in row] for row in stored]
    outer = [[f32(b) for b in row] for row in sections.blocks(4, rows, 1)] if name == "nvfp4" else [[1.0]] * rows
    return [
        [rounded(rounded(codes[r][c] * scale[r][c // size]) * outer[r][0]) for c in range(cols)] for r in range(rows)
    ]


def rounded(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


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
