"""Text from a bundle or a checkpoint: prompts and chats are continued, inside the budget that the model has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from moepack.pack.errors import InputError

from .opening import check, load_model, locate
from .progress import Reporter

PROMPT = 512  # tokens of a prompt that go in at once, in a budget
NEW_TOKENS = 64  # that a prompt is continued by
CHAT_TOKENS = 2048  # of a chat that a budget leaves room for from the start
Messages = Sequence[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 is greedy, and the others but `repetition_penalty` and `stop` then say nothing.
        top_p, top_k, min_p: as transformers has them; 1, 0 and 0 leave all tokens.
        repetition_penalty: 1 is none.
        seed: of the draws.
        stop: texts at which an answer ends; they are not part of it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def options(self) -> dict[str, Any]:
        """What transformers' `generate` takes."""
        options: dict[str, Any] = {"do_sample": self.temperature > 0, "repetition_penalty": self.repetition_penalty}
        if self.temperature > 0:
            options |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
            options |= {"min_p": self.min_p} if self.min_p else {}
        return options


class Stops:
    """Lets text through up to the first of some stop strings; what may be the beginning of one waits."""

    def __init__(self, stops: Sequence[str], tell: Callable[[str], None]) -> None:
        self._stops, self._tell = [s for s in stops if s], tell
        self._held, self.text, self.ended = "", "", False

    def put(self, text: str, last: bool = False) -> None:
        """Some more text; the last of it lets go of what waited."""
        if self.ended:
            return
        held = self._held + text
        found = [(at + len(s), at) for s in self._stops if (at := held.find(s)) >= 0]
        if found:
            self.ended, keep = True, len(held) - min(found)[1]  # the first that is complete
        else:
            begun = (n for s in self._stops for n in range(1, len(s)) if held.endswith(s[:n]))
            keep = 0 if last else max(begun, default=0)
        told, self._held = held[: len(held) - keep], held[len(held) - keep :]
        if told:
            self.text += told
            self._tell(told)


class Session:
    """A loaded model that continues one text after another; as a context it ends with the model's."""

    def __init__(
        self,
        path: str | Path,
        policy: str | None = None,
        device: str = "cpu",
        dtype: str = "auto",
        device_memory: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Look at what there is; `load` loads it.

        Raises:
            InputError: when it is not there, or the policy does not fit it.
        """
        from moepack.calibrate.data import load_tokenizer

        self._path, self._asked, self._memory = path, (policy, device, dtype, device_memory), device_memory
        with Reporter().hub_bars():
            self._source, self._is_bundle = locate(path)
            check(self._source, self._is_bundle, *self._asked)
            self.tokenizer = load_tokenizer(Path(self._source))
        if chat_template is not None:
            self.tokenizer.chat_template = chat_template
        self.model: Any = None
        self._cache: Any = None
        self._cached: list[int] = []

    def load(self, tokens: int, prompt: int, batch: int = 1, all_logits: bool = False) -> None:
        """Load the model; a budget leaves room for `batch` sequences of `tokens`, read `prompt` at a time."""
        self._chunk = prompt or PROMPT
        room: dict[str, Any] = {"kv_tokens": tokens, "batch": batch, "prefill_tokens": prompt, "all_logits": all_logits}
        with Reporter().hub_bars():
            self.model = load_model(self._source, self._is_bundle, *self._asked, **room)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._cache = None
        if self.model is not None and self._is_bundle:
            self.model.moepack.close()

    def text(self, prompt: str) -> list[int]:
        """The tokens of a plain text.

        Raises:
            InputError: when there are none.
        """
        ids: list[int] = self.tokenizer(prompt, add_special_tokens=False).input_ids if prompt else []
        if not ids:
            raise InputError("the prompt is empty")
        return ids

    def chat(self, messages: Messages) -> list[int]:
        """The tokens of a chat by the model's template, up to where the answer begins.

        Raises:
            InputError: without a template, or where it does not take these messages.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(f"{self._path}: its tokenizer has no chat template: give one with --chat-template")
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # whatever a template raises
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"{self._path}: its chat template does not take this chat: {what}") from None
        return self.text(str(text))

    def go_on(
        self, ids: list[int], new_tokens: int, sampling: Sampling, tell: Callable[[str], None] = lambda text: None
    ) -> str:
        """Continue a prompt. What an earlier one with the same beginning left in the cache is not read again.

        Args:
            ids: its tokens.
            new_tokens: at the most.
            sampling: how.
            tell: is given the text as it comes.
        """
        import torch
        from transformers import StoppingCriteriaList
        from transformers.generation.stopping_criteria import StoppingCriteria
        from transformers.generation.streamers import TextStreamer

        stops = Stops(sampling.stop, tell)

        class Streamer(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                stops.put(text, stream_end)

        class Stop(StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
                return torch.full((len(input_ids),), stops.ended, device=input_ids.device, dtype=torch.bool)

        streamer = Streamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        whole = torch.tensor([ids], device=self.model.device)
        cache, done = self._reuse(ids)
        if self._memory is not None:
            cache = self._prefill(whole, cache, done)
        torch.manual_seed(sampling.seed)
        out = self.model.generate(
            whole, attention_mask=torch.ones_like(whole), max_new_tokens=new_tokens, pad_token_id=0, streamer=streamer,
            past_key_values=cache, stopping_criteria=StoppingCriteriaList([Stop()]), return_dict_in_generate=True,
            **sampling.options(),
        )  # fmt: skip
        cached = out.past_key_values.get_seq_length() if out.past_key_values is not None else 0
        self._cache, self._cached = out.past_key_values, out.sequences[0, :cached].tolist()
        return stops.text

    def _reuse(self, ids: list[int]) -> tuple[Any, int]:
        """The cache of the last text as far as a prompt begins like it, and how many tokens that is."""
        from transformers.cache_utils import DynamicLayer

        cache, self._cache = self._cache, None  # a pass that is interrupted leaves it between two states
        done = next((n for n, (a, b) in enumerate(zip(ids, self._cached, strict=False)) if a != b), len(self._cached))
        done = min(done, len(ids) - 1)
        if cache is None or not done:
            return None, 0
        if done < len(self._cached):
            if any(type(layer) is not DynamicLayer for layer in getattr(cache, "layers", [None])):
                return None, 0  # a sliding window or a state cannot go back
            cache.crop(done - len(self._cached))
        return cache, done

    def _prefill(self, ids: Any, cache: Any, done: int) -> Any:
        """The cache of a prompt's first tokens, put in a chunk at a time; the last chunk is left to generation."""
        import torch

        last: dict[str, Any] = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        end = done + (ids.shape[1] - 1 - done) // self._chunk * self._chunk
        with torch.inference_mode():
            for part in ids[:, done:end].split(self._chunk, dim=1) if end > done else ():
                cache = self.model(input_ids=part, past_key_values=cache, use_cache=True, **last).past_key_values
        return cache


def generate(
    path: str | Path,
    prompt: str,
    policy: str | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    device_memory: int | None = None,
    max_new_tokens: int = NEW_TOKENS,
    sampling: Sampling = Sampling(),
    batch: int = 1,
    kv_tokens: int | None = None,
    prefill_tokens: int | None = None,
    all_logits: bool = False,
    messages: Messages | None = None,
    chat_template: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> str:
    """The continuation of a prompt, or the answer to `messages`.

    A budget leaves room for `batch` sequences with the KV cache of `kv_tokens` tokens, or of the prompt and all new
    ones; and for passes of `prefill_tokens` tokens, or of the prompt's, at most 512: so many of it go in at once.
    `tell` is given the text as it comes.

    Raises:
        InputError: for an empty prompt, or a model without a chat template that is given messages.
    """
    with Session(path, policy, device, dtype, device_memory, chat_template) as session:
        ids = session.text(prompt) if messages is None else session.chat(messages)
        passes = min(len(ids), PROMPT) if prefill_tokens is None else prefill_tokens
        session.load(len(ids) + max_new_tokens if kv_tokens is None else kv_tokens, passes, batch, all_logits)
        return session.go_on(ids, max_new_tokens, sampling, tell)
