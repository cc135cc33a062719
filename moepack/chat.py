"""A chat on the terminal, with a model that is loaded here or one that a server has. Decides nothing about answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from moepack.pack.errors import InputError

from .generation import Sampling, Session

HELP = "/reset forgets the chat, /quit ends it; Ctrl-C stops an answer."
Tell = Callable[[str], None]


class Answers(Protocol):
    """Who answers."""

    def answer(self, messages: list[dict[str, str]], tell: Tell) -> str:
        """The answer to a chat; `tell` is given its text as it comes."""


class Here:
    """A model loaded in this process."""

    def __init__(self, session: Session, new_tokens: int, sampling: Sampling) -> None:
        self._session, self._new_tokens, self._sampling = session, new_tokens, sampling

    def answer(self, messages: list[dict[str, str]], tell: Tell) -> str:
        """As `Answers`."""
        return self._session.go_on(self._session.chat(messages), self._new_tokens, self._sampling, tell)


class There:
    """A server with OpenAI's interface."""

    def __init__(self, url: str, key: str | None, new_tokens: int, sampling: Sampling) -> None:
        from huggingface_hub import InferenceClient

        self._client = InferenceClient(base_url=url.rstrip("/").removesuffix("/v1") + "/v1", api_key=key or "none")
        self._url, self._new_tokens, self._sampling = url, new_tokens, sampling

    def answer(self, messages: list[dict[str, str]], tell: Tell) -> str:
        """As `Answers`.

        Raises:
            InputError: when the server cannot be reached, or refuses.
        """
        sampling, text = self._sampling, ""
        options: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
        try:
            for part in self._client.chat.completions.create(
                messages=messages, stream=True, max_tokens=self._new_tokens, stop=list(sampling.stop) or None, **options
            ):
                for choice in part.choices:
                    if choice.delta.content:
                        text += choice.delta.content
                        tell(choice.delta.content)
        except Exception as error:  # httpx's, requests' or the client's own, by its version
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"{self._url}: {what}") from None
        return text


def talk(answers: Answers, system: str = "", lines: Iterable[str] | None = None, tell: Tell | None = None) -> None:
    """Read lines, answer them; until they end.

    Args:
        answers: who does.
        system: what the chat begins with, if anything.
        lines: the user's; those of the terminal without.
        tell: where answers go; to stdout without.
    """
    tell = tell or _print
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    if lines is None and sys.stdin.isatty():
        sys.stderr.write(HELP + "\n")
    for line in lines if lines is not None else _lines():
        said = line.strip()
        if said == "/quit":
            return
        if said == "/reset":
            messages = list(first)
        elif said:
            messages.append({"role": "user", "content": said})
            try:
                messages.append({"role": "assistant", "content": answers.answer(messages, tell)})
            except KeyboardInterrupt:
                messages.pop()
            tell("\n")


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _lines() -> Iterable[str]:
    shown = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(shown)
        except EOFError:
            return


def read_template(file: Path | None) -> str | None:
    """A chat template from its file.

    Raises:
        InputError: when it cannot be read.
    """
    try:
        return None if file is None else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
