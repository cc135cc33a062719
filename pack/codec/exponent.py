"""The exponent codec, reference form: BF16 weights to a smaller byte string and back, bit for bit.

A trained matrix uses few of BF16's 256 exponents, and those unevenly (about 2.6 bits of entropy); sign and mantissa are
noise. So the exponents are Huffman-coded, and the other eight bits are stored as they are (DFloat11, Zhang et al.,
2025). This layout, unlike DFloat11's, is decoded without a search by a GPU warp, SIMD or a plain loop: 32 independent
lanes a tile, code lengths of at most 8 bits, escapes patched afterwards (FORMAT.md, "Coded matrices"). FP8 codes, of
which fp8.py makes and splits the bytes, use the same tiles ("Coded FP8 codes").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import CodecError
from .bits import Bf16Bits, Buffer, Number, Words

TILE = 8192  # weights a tile: 64 quads of 4 weights for each of 32 lanes
LANES = 32
SYMBOLS = 16  # 15 exponents and the escape
ESCAPE = 15
MAX_CODE = 8  # bits: a decoder looks a symbol up in 256 entries, and four symbols fit one 32-bit window
HEADER = 48
LANE_WORDS = 9  # a coded tile begins with its base length and mode, then 32 one-byte deltas
WIDE_WORDS = 17  # a wide one with its mode, then 32 lengths of 16 bits
CODED = 0
RAW = 1
WIDE = 2
SAMPLED = 1 << 16  # from this number of weights on, the code is made from a quarter of them
BLOCK = 128  # weights a block of the sample
ABREAST = 128  # tiles decoded at a time, so that the arrays stay in a core's cache


@dataclass(frozen=True, slots=True)
class Code:
    """A matrix's prefix code: exponent[s] and code length[s] of symbol s; length 0 for a symbol that is not used."""

    exponent: Buffer
    length: Buffer

    def codewords(self) -> npt.NDArray[np.uint8]:
        """Canonical code words: by length, then by symbol, counting up."""
        word = 0
        words = np.zeros(SYMBOLS, np.uint8)
        for length in range(1, MAX_CODE + 1):
            for s in range(SYMBOLS):
                if self.length[s] == length:
                    words[s] = word
                    word += 1
            word <<= 1
        return words

    def table(self) -> Buffer:
        """The decoding table, uint8 [256]: the symbol in the high four bits, its length in the low four."""
        table = np.zeros(1 << MAX_CODE, np.uint8)
        for s, word in enumerate(self.codewords()):
            length = int(self.length[s])
            if length:
                start = int(word) << (MAX_CODE - length)
                table[start : start + (1 << (MAX_CODE - length))] = s << 4 | length
        return table


def sample(bits: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Pick the weights that make a matrix's code: all if fewer than SAMPLED, else one block of 128 in four, by a hash.

    A quarter of 65,536 is enough for 15 frequencies; counting them all would take as long as coding. Without the hash
    the sample could fall on the same columns of every row, and columns may differ.
    """
    if len(bits) < SAMPLED:
        return bits
    group = np.arange(len(bits) // BLOCK // 4, dtype=np.uint32)
    block = 4 * group.astype(np.int64) + (group * np.uint32(2654435761) >> np.uint32(30))
    return bits[: len(bits) // BLOCK * BLOCK].reshape(-1, BLOCK)[block].reshape(-1)


def make_code(counts: npt.NDArray[np.int64], sampled: bool = False) -> Code:
    """The best code for exponents that occur counts[0..255] times, with code words of at most MAX_CODE bits.

    The 15 most frequent exponents get a symbol each (ties: the smaller exponent), all others share the escape. With
    `sampled` counts the escape always has a code word. Lengths by package-merge (Larmore and Hirschberg, 1990).
    """
    order = np.lexsort((np.arange(256), -counts))[: SYMBOLS - 1]
    used = [int(e) for e in order if counts[e] > 0]
    weight = [int(counts[e]) for e in used]
    escapes = max(int(counts.sum()) - sum(weight), int(sampled))
    symbols = list(range(len(used)))
    if escapes:
        symbols.append(ESCAPE)
        weight.append(escapes)
    if len(symbols) == 1:  # a complete code needs two words: the spare one is never written
        used.append((used[0] + 1) % 256)
        symbols.append(1)
        weight.append(0)
    exponent = np.zeros(SYMBOLS, np.uint8)
    length = np.zeros(SYMBOLS, np.uint8)
    exponent[: len(used)] = used
    if not symbols:
        return Code(exponent, length)
    length[symbols] = code_lengths(weight)
    return Code(exponent, length)


def code_lengths(weights: list[int]) -> list[int]:
    """Code lengths, at most MAX_CODE bits, of the best prefix code for two or more symbols by their counts."""
    leaves = sorted((w, [i]) for i, w in enumerate(weights))
    packages = leaves
    for _ in range(MAX_CODE - 1):
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(packages[::2], packages[1::2], strict=False)]
        packages = sorted(leaves + pairs)
    length = [0] * len(weights)
    for _, members in packages[: 2 * (len(weights) - 1)]:
        for i in members:
            length[i] += 1
    return length


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A coded matrix split into its parts. All offsets were checked: none points outside its bytes."""

    weights: int
    code: Code
    tile_start: Words
    patch_start: Words
    patches: Words
    stream: Words
    plane: Buffer
    fp8: bool = False

    @property
    def tiles(self) -> int:
        """Number of tiles; the last may be partial."""
        return len(self.tile_start) - 1


def header(weights: int, stream_words: int, patches: int, code: Code) -> Buffer:
    """The first 48 bytes of a coded matrix."""
    head = np.zeros(HEADER, np.uint8)
    head[:16] = np.array([weights, -(-weights // TILE), stream_words, patches], "<u4").view(np.uint8)
    head[16:32], head[32:48] = code.exponent, code.length
    return head


def coded_size(weights: int, stream_words: int, patches: int, fp8: bool = False) -> int:
    """Bytes of a coded matrix."""
    tiles = -(-weights // TILE)
    plane = -(-weights // 2) if fp8 else weights
    return HEADER + 4 * (2 * (tiles + 1) + patches + stream_words) + plane


def parse(data: Buffer, weights: int, fp8: bool = False) -> CodedMatrix:
    """Find the parts of a coded matrix of `weights` weights; check every count and offset before anything is decoded.

    With `fp8` the weights are FP8 codes. Raises CodecError for anything that would make a decoder read or write outside
    its buffers.
    """
    if len(data) < HEADER:
        raise CodecError(f"coded matrix has {len(data)} bytes, less than its header of {HEADER}")
    n, tiles, words, n_patches = (int(v) for v in data[:16].view("<u4"))
    if n != weights:
        raise CodecError(f"coded matrix holds {n} weights, not {weights}")
    if tiles != -(-n // TILE):
        raise CodecError(f"coded matrix of {n} weights has {tiles} tiles")
    size = coded_size(n, words, n_patches, fp8)
    if size != len(data):
        raise CodecError(f"coded matrix has {len(data)} bytes, its header says {size}")
    code = Code(data[16:32], data[32:48])
    kraft = sum(1 << (MAX_CODE - int(v)) for v in code.length if 0 < v <= MAX_CODE)
    if (code.length > MAX_CODE).any() or kraft != (1 << MAX_CODE if n else 0):
        raise CodecError("code lengths do not make a complete prefix code")
    if fp8 and (n_patches or (code.exponent != np.arange(SYMBOLS)).any()):
        raise CodecError("coded FP8 codes have patches, or symbols that are not the 16 exponents in order")
    at = HEADER
    parts: list[Words] = []
    for count in (tiles + 1, tiles + 1, n_patches, words):
        parts.append(data[at : at + 4 * count].view("<u4"))
        at += 4 * count
    for name, starts, total in (("tile", parts[0], words), ("patch", parts[1], n_patches)):
        if starts[0] != 0 or starts[-1] != total or (starts[1:] < starts[:-1]).any():
            raise CodecError(f"{name} offsets do not run from 0 up to {total}")
    return CodedMatrix(n, code, parts[0], parts[1], parts[2], parts[3], data[at:], fp8)


def split(bits: Bf16Bits) -> tuple[Buffer, Buffer]:
    """BF16 bits [n] as exponents [n] and sign-and-mantissa bytes [n] (sign in bit 7)."""
    return (bits >> np.uint16(7)).astype(np.uint8), ((bits >> 8 & 0x80) | (bits & 0x7F)).astype(np.uint8)


def merge(exponents: Buffer, plane: Buffer) -> Bf16Bits:
    """The inverse of `split`."""
    sign = (plane.astype(np.uint16) & 0x80) << 8
    return (sign | exponents.astype(np.uint16) << 7 | (plane & 0x7F)).astype(np.uint16)


def lanes(values: Buffer, fill: int) -> Buffer:
    """A tile's values in lane order, [32, symbols]: quad q of lane j holds values 4*(32*q+j) .. +3."""
    quads = -(-len(values) // (4 * LANES))
    padded = np.full(quads * 4 * LANES, fill, np.uint8)
    padded[: len(values)] = values
    return padded.reshape(quads, LANES, 4).transpose(1, 0, 2).reshape(LANES, quads * 4)


def encode(bits: Bf16Bits) -> Buffer:
    """Code BF16 bits, uint16 [n], into the byte string of FORMAT.md."""
    exponents, plane = split(bits.reshape(-1))
    seen = split(sample(bits.reshape(-1)))[0]
    code = make_code(np.bincount(seen, minlength=256), len(seen) < len(exponents))
    symbol_of = np.full(256, ESCAPE, np.uint8)
    for s in range(SYMBOLS - 2, -1, -1):
        if code.length[s]:
            symbol_of[code.exponent[s]] = s
    return assemble(exponents, symbol_of, code, plane)


def assemble(exponents: Buffer, symbol_of: Buffer, code: Code, plane: Buffer, fp8: bool = False) -> Buffer:
    """Code `exponents` [n], whose symbols are symbol_of[exponent], and join all parts of the byte string."""
    made = [
        _encode_tile(exponents[at : at + TILE], symbol_of, code, code.codewords().astype(np.int64), fp8)
        for at in range(0, len(exponents), TILE)
    ]
    none = np.zeros(0, np.uint32)
    ends = [np.cumsum([0, *(len(parts[k]) for parts in made)]).astype(np.uint32) for k in range(2)]
    stream, patches = (np.concatenate([none, *(parts[k] for parts in made)]) for k in range(2))
    head = header(len(exponents), len(stream), len(patches), code)
    return np.concatenate([head, *(p.astype("<u4").view(np.uint8) for p in (*ends, patches, stream)), plane])


def assemble_fp8(codes: Buffer, code: Code) -> Buffer:
    """The byte string of FP8 codes, uint8 [n], by a code in which each exponent is its own symbol."""
    nibbles = pack_nibbles((codes >> 4 & 8 | codes & 7).astype(np.uint8))
    return assemble((codes >> 3 & 15).astype(np.uint8), code.exponent, code, nibbles, fp8=True)


def pack_nibbles(values: Buffer) -> Buffer:
    """Values below 16, uint8 [n], two a byte, the first in the low half: uint8 [ceil(n / 2)]."""
    packed = values[0::2].copy()
    packed[: len(values) // 2] |= values[1::2] << np.uint8(4)
    return packed


def unpack_nibbles(packed: Buffer, n: int) -> Buffer:
    """The inverse of `pack_nibbles`: uint8 [n]."""
    return np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[:n]


def _encode_tile(
    tile: Buffer, symbol_of: Buffer, code: Code, words_of: npt.NDArray[np.int64], fp8: bool
) -> tuple[Words, Words]:
    """The stream words and the patches of one tile's exponents."""
    symbols = symbol_of[tile]
    escaped = np.flatnonzero(symbols == ESCAPE) if not fp8 else np.zeros(0, np.int64)
    by_lane = lanes(symbols, int(np.argmax(code.length == code.length[code.length > 0].min())))
    length = code.length[by_lane].astype(np.int64)
    lane_bits = length.sum(axis=1)
    base = int(lane_bits.min())
    deltas = lane_bits - lane_bits.min()
    wide = fp8 and deltas.max() > 255
    head_words = WIDE_WORDS if wide else LANE_WORDS
    coded_words = head_words + -(-int(lane_bits.sum()) // 32)
    content = pack_nibbles(tile) if fp8 else tile
    raw_words = 1 + -(-len(content) // 4)
    if (deltas.max() > 255 and not wide) or coded_words + len(escaped) >= raw_words:
        raw = np.zeros(4 * (raw_words - 1), np.uint8)
        raw[: len(content)] = content
        return np.concatenate([np.array([RAW << 16], "<u4"), raw.view("<u4")]), np.zeros(0, np.uint32)
    # Four code words of at most 8 bits make one number, which lies in two words of the stream.
    word = words_of[by_lane].reshape(-1, 4).T
    run = length.reshape(-1, 4).T
    value = ((word[0] << run[1] | word[1]) << run[2] | word[2]) << run[3] | word[3]
    bits = run.sum(axis=0)
    at = np.cumsum(bits) - bits
    value = value.astype(np.uint64) << (64 - (at & 31) - bits).astype(np.uint64)
    room = coded_words - head_words + 1
    packed = np.bincount(at >> 5, value >> np.uint64(32), room)
    packed += np.bincount((at >> 5) + 1, value & np.uint64(0xFFFFFFFF), room)
    per_lane = lane_bits.astype("<u2").view(np.uint8) if wide else deltas.astype(np.uint8)
    head = np.concatenate([np.array([WIDE << 16 if wide else base], "<u4").view(np.uint8), per_lane]).view("<u4")
    stream = np.concatenate([head, packed[:-1].astype(np.uint32)])
    return stream, (escaped | tile[escaped].astype(np.int64) << 16).astype(np.uint32)


def decode(data: Buffer, weights: int) -> Bf16Bits:
    """Decode a coded matrix to BF16 bits, uint16 [weights].

    Raises CodecError when `data` is not a well-formed coded matrix of this number of weights.
    """
    coded = parse(data, weights)
    return merge(decode_exponents(coded), coded.plane)


def decode_exponents(coded: CodedMatrix) -> Buffer:
    """The exponents, uint8 [weights], patches applied. Raises CodecError for a malformed tile."""
    exponents = np.zeros(coded.weights, np.uint8)
    full: dict[int, list[int]] = {CODED: [], WIDE: []}
    together = []
    for t in range(coded.tiles):
        tile = exponents[t * TILE : (t + 1) * TILE]
        words = coded.stream[coded.tile_start[t] : coded.tile_start[t + 1]]
        check_tile(t, words, len(tile), coded.patches[coded.patch_start[t] : coded.patch_start[t + 1]], coded.fp8)
        mode = int(words[0] >> 16)
        if mode == RAW:
            content = words[1:].view(np.uint8)
            tile[:] = unpack_nibbles(content, len(tile)) if coded.fp8 else content[: len(tile)]
        elif len(tile) == TILE:
            full[mode].append(t)
        else:
            together.append([t])
    together += [some[at : at + ABREAST] for some in full.values() for at in range(0, len(some), ABREAST)]
    padded = np.concatenate([coded.stream, np.zeros(MAX_CODE * TILE // LANES // 32 + 2, np.uint32)]).astype(np.uint64)
    pairs = padded[:-1] << np.uint64(32) | padded[1:]  # every 64-bit window that begins at a word
    for tiles in together:
        _decode_tiles(coded, pairs, np.array(tiles), exponents)
    ends = coded.patch_start.astype(np.int64)
    tile_of = np.repeat(np.arange(coded.tiles) * TILE, ends[1:] - ends[:-1])
    exponents[tile_of + (coded.patches & 0xFFFF)] = coded.patches >> 16
    return exponents


def _decode_tiles(
    coded: CodedMatrix, pairs: npt.NDArray[np.uint64], tiles: npt.NDArray[np.int64], exponents: Buffer
) -> None:
    """Decode coded tiles of equal size and mode together, a step for each symbol of a lane."""
    size = min(TILE, len(exponents) - int(tiles[0]) * TILE)
    quads = -(-size // (4 * LANES))
    table = coded.code.table()
    length_of = (table & 15).astype(np.uint64)
    exponent_of = coded.code.exponent[table >> 4]
    first = coded.tile_start[tiles].astype(np.int64)
    wide = coded.stream[first[0]] >> 16 == WIDE
    head_words = WIDE_WORDS if wide else LANE_WORDS
    per_lane = coded.stream[first[:, None] + np.arange(1, head_words)].view("<u2" if wide else "u1")
    lane_bits = (coded.stream[first] & 0xFFFF).astype(np.int64)[:, None] + per_lane
    end = np.cumsum(lane_bits, axis=1) + 32 * (first + head_words)[:, None]
    position = (end - lane_bits).astype(np.uint64)
    out = np.empty((len(tiles), quads, LANES, 4), np.uint8)
    for q in range(quads):
        begin = position & np.uint64(31)
        window = pairs.take((position >> np.uint64(5)).view(np.int64)) << begin
        for k in range(4):  # four code words of at most 8 bits, from 32 bits or more
            top = (window >> np.uint64(56)).view(np.int64)
            out[:, q, :, k] = exponent_of.take(top)
            length = length_of.take(top)
            window <<= length
            position += length
    wrong = (position != end.astype(np.uint64)).any(axis=1)
    if wrong.any():
        raise CodecError(f"tile {tiles[wrong][0]}: lanes do not end where their lengths say")
    for t, decoded in zip(tiles.tolist(), out.reshape(len(tiles), -1), strict=True):
        exponents[t * TILE : t * TILE + size] = decoded[:size]


def check_tile(t: int, words: Words, weights: int, patches: Words, fp8: bool) -> None:
    """Check one tile's mode, lane lengths and patches against its bounds; raises CodecError."""
    mode = int(words[0] >> 16) if len(words) else -1
    base = int(words[0] & 0xFFFF) if len(words) else 0
    if mode == RAW:
        if len(words) != 1 + -(-weights // (8 if fp8 else 4)) or base or len(patches):
            raise CodecError(f"tile {t}: raw tile of {weights} weights has {len(words)} words, {len(patches)} patches")
    elif mode == CODED or (mode == WIDE and fp8 and not base):
        head_words = WIDE_WORDS if mode == WIDE else LANE_WORDS
        if len(words) < head_words:
            raise CodecError(f"tile {t}: coded tile of {len(words)} words")
        per_lane = words[1:head_words].view("<u2" if mode == WIDE else "u1")
        total = LANES * base + int(per_lane.sum(dtype=np.int64))
        if -(-total // 32) != len(words) - head_words:
            raise CodecError(f"tile {t}: lanes of {total} bits in {len(words) - head_words} words")
        if (patches & 0xFFFF >= weights).any() or (patches >> 24).any():
            raise CodecError(f"tile {t}: a patch points outside the tile")
    else:
        raise CodecError(f"tile {t}: unknown mode")
