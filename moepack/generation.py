"""Continue prompts and chats with a bundle or checkpoint, inside a memory budget."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from moepack.families.arguments import cache_in, with_cache
from moepack.pack.errors import InputError, NotFiniteError
from moepack.runtime.planning.options import DEFAULTS, LoadOptions

from .server.batching.text import Pieces, Stops
from .server.batching.tokens import Tokens, end_tokens
from .server.options import Sampling
from .server.own_sampling import SamplingFlags, described
from .shared.opening import check, load_model, locate
from .shared.progress import SILENT, loading
from .spent import Spent

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache, StaticCache

PROMPT = 512  # by default, the most prompt tokens that one pass reads in a budget
NEW_TOKENS = 64  # the most tokens of a continuation
FIXED = 1 << 14  # the most tokens of a cache whose size is fixed from the start
CHAT_TOKENS = 2048  # tokens of a chat for which a budget reserves cache from the start
GREEDY = Sampling(temperature=0.0)
Messages = Sequence[dict[str, str]]
Tell = Callable[[str], None]


class Session:
    """A model that continues one text after another. `load` loads the model; leaving the context closes it."""

    def __init__(self, path: str | Path, options: LoadOptions = DEFAULTS, chat_template: str | None = None) -> None:
        """Find the model and read its tokenizer. Raises InputError for a missing model or options that do not fit."""
        self._path = path
        self._options = options
        with SILENT.hub_bars():
            self._source = locate(path)
            check(self._source, options)
            from moepack.families.tokenizer import load_tokenizer

            self.tokenizer = load_tokenizer(Path(self._source.path))
        if chat_template is not None:
            self.tokenizer.chat_template = chat_template
        self.model: Any = None
        self.spent = Spent()
        self._cache: Cache | None = None
        self._cached: list[int] = []
        self._ends: set[int] = set()

    def load(self, kv_tokens: int, prefill_tokens: int) -> None:
        """Load the model. The arguments apply where the options leave `kv_tokens` or `prefill_tokens` unset."""
        from moepack.runtime.dense.by_row import serve_rows

        from .server.batching.packed_cache import layers_with_states

        options = self._options.filled(kv_tokens=kv_tokens, prefill_tokens=prefill_tokens, all_logits=False)
        self._chunk = options.workload.prefill_tokens or PROMPT
        self._room = options.workload.kv_tokens
        with SILENT.hub_bars(), loading(str(self._path)) as report:
            self.model = load_model(self._source, options, report)
        serve_rows(self.model, layers_with_states(self.model.config))  # a prompt's later passes go on from their state
        self._ends = {*end_tokens(self.model.generation_config)}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._cache = None
        if self.model is not None and self._source.is_bundle:
            self.model.moepack.close()

    def sampling(self, flags: SamplingFlags) -> Sampling:
        """Return how tokens are chosen by flags and the loaded model's own values, which stderr shows."""
        own = flags.own(self.model.generation_config)
        if own:
            print(f"moepack: {described(own)}", file=sys.stderr)
        return flags.over(own)

    def text(self, prompt: str) -> list[int]:
        """The token ids of a plain text. Raises InputError if there are none."""
        if any("\ud800" <= character <= "\udfff" for character in prompt):  # how Python keeps bytes of no text
            raise InputError("the prompt is not text in UTF-8")
        ids: list[int] = self.tokenizer(prompt, add_special_tokens=False).input_ids if prompt else []
        if not ids:
            raise InputError("the prompt is empty")
        return ids

    def chat(self, messages: Messages) -> list[int]:
        """The token ids of a chat in the model's chat template, up to the start of the answer.

        Raises:
            InputError: if there is no template, or the template rejects these messages.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(f"{self._path}: its tokenizer has no chat template: give one with --chat-template")
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may raise any kind
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"{self._path}: its chat template does not take this chat: {what}") from None
        return self.text(str(text))

    def go_on(
        self,
        ids: list[int],
        new_tokens: int,
        sampling: Sampling = GREEDY,
        stop: Sequence[str] = (),
        tell: Tell = lambda text: None,
    ) -> str:
        """Continue a prompt by at most `new_tokens` tokens. A prefix shared with the last text comes from its KV cache.

        Args:
            ids: the prompt's tokens.
            new_tokens: the most tokens to add.
            sampling: how tokens are chosen; a seed gives the same answer as in `moepack serve`.
            stop: texts at which the answer ends; they are not part of it.
            tell: receives the text as it is generated.

        Raises:
            NotFiniteError: if logits are NaN or infinite. `tell` has received the text before them.
        """
        import torch

        from .server.batching.sampling import Sampler

        stops = Stops([s for s in stop if s])
        pieces = Pieces(Tokens(self.tokenizer).decode, [])
        sampler = Sampler(sampling, ids, self.model.device)
        told: list[str] = []

        def show(text: str) -> None:
            if text:
                told.append(text)
                tell(text)

        seen = list(ids)
        ended = False
        began = first = time.perf_counter()
        with torch.inference_mode():
            cache, done = self._reuse(ids, len(ids) + new_tokens)
            cache = self._static(len(ids) + new_tokens) if cache is None else cache
            logits, cache = self._read(ids, cache, done)
            for left in reversed(range(new_tokens)):
                try:
                    token = sampler.choose(logits).token
                except NotFiniteError as error:
                    raise error.within(str(self._path)) from None
                if len(seen) == len(ids):
                    first = time.perf_counter()
                    self.spent.read(len(ids) - done, first - began)
                text, ended = stops.push(pieces.push(token))
                show(text)
                if ended or token in self._ends or not left:
                    break
                seen.append(token)
                logits, cache = self._read(seen, cache, 0 if cache is None else len(seen) - 1)
        self.spent.decoded(len(seen) - len(ids), time.perf_counter() - first)
        if not ended:
            text, ended = stops.push(pieces.end())
            show(text if ended else text + stops.end())
        self._cache = cache
        self._cached = [] if cache is None else seen
        return "".join(told)

    def _static(self, tokens: int) -> StaticCache | None:
        """A cache of fixed size with room for so many tokens on a GPU, where decode steps become graphs.

        None, for a cache that grows, where that size is more than a budget reserves or most answers need.
        """
        from transformers.cache_utils import StaticCache, StaticLayer

        if not self._source.is_bundle or self.model._moepack_wrapper.graphs is None:
            return None
        room = self._room if self._options.in_budget else 1 << (tokens - 1).bit_length()  # a chat fills it in turns
        if tokens > room or room > FIXED or self.model.config._attn_implementation not in ("sdpa", "eager"):
            return None
        cache = StaticCache(config=self.model.config, max_cache_len=room)
        return cache if all(type(layer) is StaticLayer for layer in cache.layers) else None

    def _reuse(self, ids: list[int], tokens: int) -> tuple[Cache | None, int]:
        """Take the last text's KV cache, cut to the prefix shared with a prompt, and its length; or (None, 0).

        None also where it has no room for so many tokens.
        """
        from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

        from moepack.runtime.kv.growing import GrowingLayer

        # not kept: an interrupted pass leaves it half updated
        cache = self._cache
        self._cache = None
        done = next((n for n, (a, b) in enumerate(zip(ids, self._cached, strict=False)) if a != b), len(self._cached))
        done = min(done, len(ids) - 1)
        if cache is None or not done:
            return None, 0
        layers = getattr(cache, "layers", [None])
        if any(hasattr(layer, "set_prefill_length") for layer in layers):
            return None, 0  # it knows the first prompt's length, and this one is longer
        static = all(isinstance(layer, StaticLayer) for layer in layers)  # full attention's: `_static` makes no others
        if static and layers[0].max_cache_len < tokens:
            return None, 0
        if done < len(self._cached):
            plain = DynamicLayer, GrowingLayer
            cut_by_layer = type(cache).crop is Cache.crop
            if not static and (not cut_by_layer or any(type(layer) not in plain for layer in layers)):
                return None, 0  # the cache of a sliding window or a recurrent state cannot be cut
            cache.crop(done - len(self._cached))
        return cache, done

    def _read(self, ids: list[int], cache: Cache | None, done: int) -> tuple[Tensor, Cache | None]:
        """Read tokens from `done` on, in a budget a chunk at a time; return the last one's logits, and the cache."""
        import torch

        from .server.batching.packed_cache import told_cache

        last: dict[str, object] = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        new = torch.tensor([ids[done:]], device=self.model.device)
        if cache is None:
            cache = told_cache(self.model.config, len(ids))
        for part in new.split(self._chunk if self._options.in_budget else new.shape[1], dim=1):
            out = self.model(input_ids=part, use_cache=True, **with_cache(self.model, cache), **last)
            cache = cache_in(out)
            if cache is None and part.shape[1] < new.shape[1]:
                out = self.model(input_ids=new, use_cache=True, **last)
                break
        return out.logits[0, -1].float(), cache


def generate(
    path: str | Path,
    prompt: str,
    options: LoadOptions = DEFAULTS,
    max_new_tokens: int = NEW_TOKENS,
    sampling: Sampling | SamplingFlags = GREEDY,
    stop: Sequence[str] = (),
    messages: Messages | None = None,
    chat_template: str | None = None,
    tell: Tell = lambda text: None,
    finished: Callable[[Session], object] = lambda session: None,
) -> str:
    """Continue a prompt, or answer `messages`. `tell` receives the text as it is generated.

    `finished` receives the session, with what the answer took, before the model is closed.

    By default, a budget reserves memory for the KV cache of the prompt and all new tokens (`kv_tokens`), and for passes
    of the prompt's tokens, at most 512 (`prefill_tokens`).

    Raises:
        InputError: for an empty prompt, or messages without a chat template.
    """
    with Session(path, options, chat_template) as session:
        ids = session.text(prompt) if messages is None else session.chat(messages)
        session.load(len(ids) + max_new_tokens, min(len(ids), PROMPT))
        how = session.sampling(sampling) if isinstance(sampling, SamplingFlags) else sampling
        text = session.go_on(ids, max_new_tokens, how, stop, tell)
        finished(session)
        return text
