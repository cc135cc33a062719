"""Chat on the terminal with a model loaded in this process, or with a server."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence

from moepack.pack.errors import InputError

from .generation import Session
from .server.options import Sampling

HELP = "/reset forgets the chat, /quit ends it; Ctrl-C stops an answer."
Tell = Callable[[str], None]
Answer = Callable[[list[dict[str, str]], Tell], str]  # answers a chat; passes the text to `Tell` as it is generated


def local_model(session: Session, new_tokens: int, sampling: Sampling, stop: Sequence[str] = ()) -> Answer:
    """Return the `Answer` of a model loaded in this process."""
    return lambda messages, tell: session.go_on(session.chat(messages), new_tokens, sampling, stop, tell)


def server(url: str, key: str | None, new_tokens: int, sampling: Sampling, stop: Sequence[str] = ()) -> Answer:
    """Return the `Answer` of the first model that a server with OpenAI's interface lists.

    Calling the answer raises InputError if the server cannot be reached or refuses.
    """
    from huggingface_hub import InferenceClient, get_session

    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    key = key or "none"
    client = InferenceClient(base_url=base, api_key=key)
    # OpenAI's interface lacks these, but many servers know them: they are sent only if set.
    extra = {"top_k": sampling.top_k, "min_p": sampling.min_p, "repetition_penalty": sampling.repetition}
    asked: dict[str, object] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "max_tokens": new_tokens,
        "stop": list(stop) or None,
        "extra_body": {n: v for n, v in extra.items() if v != (1.0 if n.startswith("rep") else 0)} or None,
    }

    def answer(messages: list[dict[str, str]], tell: Tell) -> str:
        text = ""
        try:
            if "model" not in asked:
                found = get_session().get(base + "/models", headers={"authorization": f"Bearer {key}"})
                found.raise_for_status()
                asked["model"] = str(found.json()["data"][0]["id"])
            for part in client.chat.completions.create(messages=messages, stream=True, **asked):
                for choice in part.choices:
                    if choice.delta.content:
                        text += choice.delta.content
                        tell(choice.delta.content)
        except Exception as error:  # any error of httpx or of the client
            raise InputError(f"{url}: {_why(error)}") from None
        return text

    return answer


def _why(error: Exception) -> str:
    """Return an error as one line: the server's own message if the server sent one."""
    answer = getattr(error, "response", None)
    with contextlib.suppress(Exception):  # the answer may have another body, or none
        return str(answer.json()["error"]["message"])  # type: ignore[union-attr]
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def talk(answer: Answer, system: str = "", lines: Iterable[str] | None = None, tell: Tell | None = None) -> None:
    """Read messages from `lines` (default: the terminal), and pass each answer to `tell` (default: stdout).

    `system` is the message that begins the chat.
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
                messages.append({"role": "assistant", "content": answer(messages, tell)})
            except KeyboardInterrupt:
                messages.pop()
            tell("\n")


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _lines() -> Iterable[str]:
    shown = ""
    if sys.stdin.isatty():
        shown = "> "
        with contextlib.suppress(ImportError):  # Python may be built without it
            import readline  # noqa: F401 # lets `input` edit a line, and bring earlier ones back
    while True:
        try:
            yield input(shown)
        except EOFError:
            return
