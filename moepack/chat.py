"""A chat on the terminal, with a model that is loaded here or one that a server has. Decides nothing about answers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from moepack.pack.errors import InputError

from .generation import Session
from .server.options import Sampling

HELP = "/reset forgets the chat, /quit ends it; Ctrl-C stops an answer."
Tell = Callable[[str], None]


class Answers(Protocol):
    """Who answers."""

    def answer(self, messages: list[dict[str, str]], tell: Tell) -> str:
        """The answer to a chat; `tell` is given its text as it comes."""


class Here:
    """A model loaded in this process."""

    def __init__(self, session: Session, new_tokens: int, sampling: Sampling, stop: Sequence[str] = ()) -> None:
        self._session, self._asked = session, (new_tokens, sampling, stop)

    def answer(self, messages: list[dict[str, str]], tell: Tell) -> str:
        """As `Answers`."""
        return self._session.go_on(self._session.chat(messages), *self._asked, tell)


class There:
    """A server with OpenAI's interface; the first model that it lists."""

    def __init__(
        self, url: str, key: str | None, new_tokens: int, sampling: Sampling, stop: Sequence[str] = ()
    ) -> None:
        from huggingface_hub import InferenceClient

        self._url, self._key, base = url, key, url.rstrip("/").removesuffix("/v1") + "/v1"
        self._models, self._name = base + "/models", ""
        self._client = InferenceClient(base_url=base, api_key=key or "none")
        self._asked: dict[str, Any] = {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed,
            "max_tokens": new_tokens, "stop": list(stop) or None,
        }  # fmt: skip
        # Not in OpenAI's interface, though many servers know them: sent where they are asked for.
        extra = {"top_k": sampling.top_k, "min_p": sampling.min_p, "repetition_penalty": sampling.repetition}
        self._asked["extra_body"] = {n: v for n, v in extra.items() if v != (1.0 if n.startswith("rep") else 0)} or None

    def _model(self) -> str:
        from huggingface_hub import get_session

        if not self._name:
            found = get_session().get(self._models, headers={"authorization": f"Bearer {self._key or 'none'}"})
            found.raise_for_status()
            self._name = str(found.json()["data"][0]["id"])
        return self._name

    def answer(self, messages: list[dict[str, str]], tell: Tell) -> str:
        """As `Answers`.

        Raises:
            InputError: when the server cannot be reached, or refuses.
        """
        text = ""
        try:
            for part in self._client.chat.completions.create(
                messages=messages, model=self._model(), stream=True, **self._asked
            ):
                for choice in part.choices:
                    if choice.delta.content:
                        text += choice.delta.content
                        tell(choice.delta.content)
        except Exception as error:  # httpx's or the client's own
            raise InputError(f"{self._url}: {_why(error)}") from None
        return text


def _why(error: Exception) -> str:
    """In one line; of a refusal the server's own words."""
    answer = getattr(error, "response", None)
    with contextlib.suppress(Exception):  # whatever the body is
        return str(answer.json()["error"]["message"])  # type: ignore[union-attr]
    return str(error).splitlines()[0] if str(error) else type(error).__name__


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
