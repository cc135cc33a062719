"""Continue prompts and chats with a bundle or checkpoint, inside a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from moepack.families.arguments import cache_in, with_cache
from moepack.pack.errors import InputError
from moepack.runtime.planning.options import DEFAULTS, LoadOptions

from .opening import check, load_model, locate
from .progress import Reporter, loading_bar
from .server.batching.text import Stops
from .server.batching.tokens import end_tokens
from .server.options import Sampling

PROMPT = 512  # by default, the most prompt tokens that one pass reads in a budget
NEW_TOKENS = 64  # the most tokens of a continuation
CHAT_TOKENS = 2048  # tokens of a chat for which a budget reserves cache from the start
GREEDY = Sampling(temperature=0.0)
Messages = Sequence[dict[str, str]]
Tell = Callable[[str], None]


class Session:
    """A model that continues one text after another. `load` loads the model; leaving the context closes it."""

    def __init__(self, path: str | Path, options: LoadOptions = DEFAULTS, chat_template: str | None = None) -> None:
        """Find the model and read its tokenizer. Raises InputError for a missing model or options that do not fit."""
        self._path, self._options = path, options
        with Reporter().hub_bars():
            self._source = locate(path)
            check(self._source, options)
            from moepack.calibrate.text.windows import load_tokenizer

            self.tokenizer = load_tokenizer(Path(self._source.path))
        if chat_template is not None:
            self.tokenizer.chat_template = chat_template
        self.model: Any = None
        self._cache: Any = None
        self._cached: list[int] = []

    def load(self, kv_tokens: int, prefill_tokens: int) -> None:
        """Load the model. The arguments apply where the options leave `kv_tokens` or `prefill_tokens` unset."""
        from transformers import GenerationConfig

        options = self._options.filled(kv_tokens=kv_tokens, prefill_tokens=prefill_tokens, all_logits=False)
        self._chunk = options.workload.prefill_tokens or PROMPT
        with Reporter().hub_bars(), loading_bar(str(self._path)) as report:
            self.model = load_model(self._source, options, report)
        # Other settings of the model's generation_config.json would apply in addition to the caller's.
        self.model.generation_config = GenerationConfig(eos_token_id=end_tokens(self.model.generation_config) or None)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._cache = None
        if self.model is not None and self._source.is_bundle:
            self.model.moepack.close()

    def text(self, prompt: str) -> list[int]:
        """The token ids of a plain text. Raises InputError if there are none."""
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
        self, ids: list[int], new_tokens: int, sampling: Sampling = GREEDY, stop: Sequence[str] = (),
        tell: Tell = lambda text: None,
    ) -> str:  # fmt: skip
        """Continue a prompt by at most `new_tokens` tokens. A prefix shared with the last text comes from its KV cache.

        Args:
            ids: the prompt's tokens.
            new_tokens: the most tokens to add.
            sampling: how tokens are chosen; a seed gives the same answer as in `moepack serve`.
            stop: texts at which the answer ends; they are not part of it.
            tell: receives the text as it is generated.
        """
        import torch
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
        from transformers.generation.logits_process import LogitsProcessor
        from transformers.generation.stopping_criteria import StoppingCriteria
        from transformers.generation.streamers import TextStreamer

        from .server.batching.sampling import Sampler

        stops, told, ended = Stops([s for s in stop if s]), list[str](), False
        sampler = Sampler(sampling, ids, self.model.device)

        class Streamer(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                nonlocal ended
                if ended:
                    return
                text, ended = stops.push(text)
                text += stops.end() if stream_end and not ended else ""
                if text:
                    told.append(text)
                    tell(text)

        class Stop(StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
                return torch.full((len(input_ids),), ended, device=input_ids.device, dtype=torch.bool)

        class Choose(LogitsProcessor):
            def __call__(self, input_ids: Any, scores: Any) -> Any:
                return torch.full_like(scores, -torch.inf).index_fill_(
                    1, torch.tensor([sampler.choose(scores[0]).token], device=scores.device), 0.0
                )

        streamer = Streamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        whole = torch.tensor([ids], device=self.model.device)
        cache, done = self._reuse(ids)
        if self._options.in_budget:
            cache = self._prefill(whole, cache, done)
        settings = GenerationConfig(max_new_tokens=new_tokens, pad_token_id=0, return_dict_in_generate=True)
        out = self.model.generate(
            whole, attention_mask=torch.ones_like(whole), streamer=streamer,
            generation_config=settings, stopping_criteria=StoppingCriteriaList([Stop()]),
            logits_processor=LogitsProcessorList([Choose()]), **with_cache(self.model, cache),
        )  # fmt: skip
        self._cache = cache_in(out)
        self._cached = [] if self._cache is None else out.sequences[0, : self._cache.get_seq_length()].tolist()
        return "".join(told)

    def _reuse(self, ids: list[int]) -> tuple[Any, int]:
        """Take the last text's KV cache, cut to the prefix shared with a prompt, and its length; or (None, 0)."""
        from transformers.cache_utils import DynamicLayer

        from moepack.runtime.kv.growing import GrowingLayer

        cache, self._cache = self._cache, None  # not kept: an interrupted pass leaves it half updated
        done = next((n for n, (a, b) in enumerate(zip(ids, self._cached, strict=False)) if a != b), len(self._cached))
        done = min(done, len(ids) - 1)
        if cache is None or not done:
            return None, 0
        if done < len(self._cached):
            plain = DynamicLayer, GrowingLayer
            if any(type(layer) not in plain for layer in getattr(cache, "layers", [None])):
                return None, 0  # the cache of a sliding window or a recurrent state cannot be cut
            cache.crop(done - len(self._cached))
        return cache, done

    def _prefill(self, ids: Any, cache: Any, done: int) -> Any:
        """Read a prompt into the cache a chunk at a time, except the last chunk, and return the cache."""
        import torch

        last: dict[str, Any] = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        end = done + (ids.shape[1] - 1 - done) // self._chunk * self._chunk
        with torch.inference_mode():
            for part in ids[:, done:end].split(self._chunk, dim=1) if end > done else ():
                cache = cache_in(self.model(input_ids=part, use_cache=True, **with_cache(self.model, cache), **last))
        return cache


def generate(
    path: str | Path,
    prompt: str,
    options: LoadOptions = DEFAULTS,
    max_new_tokens: int = NEW_TOKENS,
    sampling: Sampling = GREEDY,
    stop: Sequence[str] = (),
    messages: Messages | None = None,
    chat_template: str | None = None,
    tell: Tell = lambda text: None,
) -> str:
    """Continue a prompt, or answer `messages`. `tell` receives the text as it is generated.

    By default, a budget reserves memory for the KV cache of the prompt and all new tokens (`kv_tokens`), and for passes
    of the prompt's tokens, at most 512 (`prefill_tokens`).

    Raises:
        InputError: for an empty prompt, or messages without a chat template.
    """
    with Session(path, options, chat_template) as session:
        ids = session.text(prompt) if messages is None else session.chat(messages)
        session.load(len(ids) + max_new_tokens, min(len(ids), PROMPT))
        return session.go_on(ids, max_new_tokens, sampling, stop, tell)
