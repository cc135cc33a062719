"""The tensors of a generated model, each drawn anew when it is asked for. NumPy alone: both sides' writers read it.

A token's embedding lies along its topic's and its cluster's directions, and layers add little to it, so routers read
topics as they would in a trained model: experts are busy by topic, and the text shifts them. With these shares the
busiest tenth of a layer's experts takes about half of a text's tokens, and a cache of the last used 12.5, 25 and 50 %
of them hits 0.43, 0.70 and 0.93 of the time (one layer, without attention).
"""

import re
import zlib

import numpy as np
import numpy.typing as npt

from .shapes import CLUSTERS, TOPICS, WORDS, Shape, place

# shares of an embedding's square
TOPIC = 0.34
CLUSTER = 0.1
ADDED = 0.01  # what attention or experts of a layer add, over the embedding, about
_ROWS = 1 << 13
Bits = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]


def to_bf16(values: Floats) -> Bits:
    """Rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_float(bits: Bits) -> Floats:
    """The values of BF16's bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Weights:
    """The tensors by their names in a checkpoint."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        s = shape
        self._sizes: dict[str, tuple[int, ...]] = {
            "q_proj": (s.heads * s.head_dim, s.hidden), "k_proj": (s.kv_heads * s.head_dim, s.hidden),
            "v_proj": (s.kv_heads * s.head_dim, s.hidden), "o_proj": (s.hidden, s.heads * s.head_dim),
            "q_norm": (s.head_dim,), "k_norm": (s.head_dim,), "input_layernorm": (s.hidden,),
            "post_attention_layernorm": (s.hidden,), "norm": (s.hidden,), "gate": (s.experts, s.hidden),
            "gate_proj": (s.inner, s.hidden), "up_proj": (s.inner, s.hidden), "down_proj": (s.hidden, s.inner),
            "embed_tokens": (s.vocabulary, s.hidden), "lm_head": (s.vocabulary, s.hidden),
        }  # fmt: skip
        # Scales at which q, k, v, gate and up give outputs of about 1, and o and down of about ADDED.
        unit = s.hidden**-0.5
        self._scales = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"), unit)
        self._scales["o_proj"] = 2 * ADDED * (s.heads * s.head_dim) ** -0.5
        self._scales["down_proj"] = 4 * ADDED * s.inner**-0.5

    def source(self, name: str) -> str:
        """The name of the tensor that has the same values: layers repeat, and a layer's experts."""
        if name.endswith(".mlp.gate.weight"):
            return name
        name = re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) % self.shape.distinct}", name)
        return re.sub(r"experts\.(\d+)", lambda m: f"experts.{int(m[1]) % self.shape.kinds}", name)

    def bits(self, name: str) -> Bits:
        """A tensor as the bits of BF16."""
        kind = name.removesuffix(".weight").rpartition(".")[2]
        size = self._sizes[kind]
        if len(size) == 1:
            return np.full(size, 0x3F80, np.uint16)  # ones
        if kind == "embed_tokens":
            return self._embedding(size[0])
        rng = np.random.default_rng(zlib.crc32(self.source(name).encode()))
        # Rows at unit length would give logits of 1: sharper ones give experts unequal weights, as trained routers do.
        scale = 2 * self.shape.hidden**-0.5 if kind == "gate" else self._scales[kind]
        out = np.empty(size, np.uint16)
        for first in range(0, size[0], _ROWS):
            part = rng.standard_normal((min(_ROWS, size[0] - first), size[1]), np.float32)
            out[first : first + len(part)] = to_bf16(part * np.float32(scale))
        return out

    def embedding(self, ids: npt.NDArray[np.int64]) -> Floats:
        """Embeddings of tokens, float32 [tokens, hidden], without making the whole table."""
        return to_float(self._embedding(int(ids.max()) + 1)[ids])

    def _embedding(self, rows: int) -> Bits:
        hidden = self.shape.hidden
        rng = np.random.default_rng(0)
        topics = rng.standard_normal((TOPICS, hidden), np.float32)
        clusters = rng.standard_normal((TOPICS * CLUSTERS, hidden), np.float32)
        out = np.empty((rows, hidden), np.uint16)
        for first in range(0, rows, WORDS):
            part = rng.standard_normal((WORDS, hidden), np.float32)[: rows - first]
            if (found := place(first)) is not None:
                part *= np.float32((1 - TOPIC - CLUSTER) ** 0.5)
                part += np.float32(TOPIC**0.5) * topics[found[0]] + np.float32(CLUSTER**0.5) * clusters[found[1]]
            out[first : first + len(part)] = to_bf16(part)
        return out


def chosen(weights: Weights, layer: int, embedded: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    """What a layer's router chooses for embeddings as they are: experts [tokens, top_k], the most wanted first, and
    their gate weights."""
    router = to_float(weights.bits(f"model.layers.{layer}.mlp.gate.weight"))
    hidden = embedded / np.sqrt(np.mean(embedded**2, axis=1, keepdims=True))
    logits = hidden @ router.T
    order = np.argsort(-logits, axis=1)[:, : weights.shape.top_k]
    best = np.take_along_axis(logits, order, 1)
    gates = np.exp(best - best[:, :1])
    return order, (gates / gates.sum(1, keepdims=True)).astype(np.float32)
