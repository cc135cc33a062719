"""What a library makes of an export: greedy texts, logits, losses. Each runs in a process of its own.

    python readers.py READER DIRECTORY ASKED.npz ANSWER.npz

It may be the interpreter of another environment: nothing but NumPy is imported before the library is.

ASKED holds `prompts` int64 [n, p], `texts` int64 [n, t], which are ours, and `windows` int64 [m, w]; ANSWER holds
`greedy` int64 [n, t], `logits` float32 [n, t, vocabulary], of each of our texts' tokens, and `losses` float64 [m], nats
a token.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]


class Reader(Protocol):
    """A model that some library has read."""

    def logits(self, ids: Sequence[int]) -> Logits:
        """Logits behind every token, [tokens, vocabulary]."""

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """So many tokens after these, each the likeliest; the end of a text does not end them."""


class OfTorch:
    """A transformers model, of this library or of gptqmodel."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def logits(self, ids: Sequence[int]) -> Logits:
        """See Reader."""
        return self._step(ids, None)[0]

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """See Reader."""
        out, cache = list[int](), None
        for _ in range(count):
            logits, cache = self._step(out[-1:] or ids, cache)
            out.append(int(logits[-1].argmax()))
        return out

    def _step(self, ids: Sequence[int], cache: Any) -> tuple[Logits, Any]:
        import torch

        with torch.no_grad():
            made = self._model(torch.tensor([list(ids)]), past_key_values=cache, use_cache=True)
        return made.logits[0].float().numpy(), made.past_key_values


class OfLlama:
    """llama.cpp's."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def logits(self, ids: Sequence[int]) -> Logits:
        """See Reader."""
        self._model.reset()
        self._model.eval(list(ids))
        return np.array(self._model.scores[: len(ids)], np.float32)

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """See Reader."""
        self._model.reset()
        made = self._model.generate(list(ids), top_k=1, temp=0.0)
        return [int(token) for token, _ in zip(made, range(count), strict=False)]


def _transformers(path: str) -> Reader:
    import torch
    from transformers import AutoModelForCausalLM

    return OfTorch(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


def _gptqmodel(path: str) -> Reader:
    import torch
    from gptqmodel import BACKEND, GPTQModel

    return OfTorch(GPTQModel.load(path, device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.bfloat16).model)


def _llama(path: str) -> Reader:
    (file,) = Path(path).glob("*.gguf")
    llama = importlib.import_module("llama_cpp").Llama
    return OfLlama(llama(str(file), n_ctx=512, n_batch=512, n_threads=1, logits_all=True, verbose=False))


READERS: dict[str, Callable[[str], Reader]] = {
    "transformers": _transformers, "gptqmodel": _gptqmodel, "llama.cpp": _llama,
}  # fmt: skip


def losses(reader: Reader, windows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Mean loss of each window's tokens but its first, nats."""
    out = []
    for window in windows:
        logits = reader.logits(window.tolist())[:-1].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        chosen = np.take_along_axis(logits, window[1:, None], -1)[:, 0]
        out.append((np.log(np.exp(logits).sum(-1)) - chosen).mean())
    return np.array(out)


def behind(reader: Reader, prompts: npt.NDArray[np.int64], texts: npt.NDArray[np.int64]) -> Logits:
    """Logits that each token of some texts was chosen by, [n, tokens, vocabulary]."""
    first, last = prompts.shape[1] - 1, texts.shape[1]
    every = [
        reader.logits([*p.tolist(), *t.tolist()])[first : first + last] for p, t in zip(prompts, texts, strict=True)
    ]
    return np.stack(every)


def main() -> None:
    """Answer what is asked."""
    kind, path, asked, answer = sys.argv[1:]
    given, reader = np.load(asked), READERS[kind](path)
    prompts, texts = given["prompts"], given["texts"]
    np.savez(
        answer,
        greedy=np.array([reader.greedy(p.tolist(), texts.shape[1]) for p in prompts]),
        logits=behind(reader, prompts, texts),
        losses=losses(reader, given["windows"]),
    )


if __name__ == "__main__":
    main()
