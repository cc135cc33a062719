"""Chat on the terminal with a model loaded in this process, or with a server."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence

from moepack.pack.errors import InputError

from .generation import Session
from .server.options import Sampling
from .server.own_sampling import SamplingFlags

HELP = "/reset forgets the chat, /exit or Ctrl-D ends it, /help says this again; Ctrl-C stops an answer."
_COMMAND = re.compile(r"/[a-z]+")  # a line that is nothing else
Tell = Callable[[str], None]
Answer = Callable[[list[dict[str, str]], Tell], str]  # answers a chat; passes the text to `Tell` as it is generated


def local_model(session: Session, new_tokens: int, sampling: Sampling, stop: Sequence[str] = ()) -> Answer:
    """Return the `Answer` of a model loaded in this process."""
    return lambda messages, tell: session.go_on(session.chat(messages), new_tokens, sampling, stop, tell)


def server(url: str, key: str | None, new_tokens: int, sampling: SamplingFlags, stop: Sequence[str] = ()) -> Answer:
    """Return the `Answer` of the first model that a server with OpenAI's interface lists.

    What no flag of `sampling` names is left to the server.

    Calling the answer raises InputError if the server cannot be reached or refuses.
    """
    from huggingface_hub import InferenceClient, get_session

    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    key = key or "none"
    client = InferenceClient(base_url=base, api_key=key)
    # OpenAI's interface lacks these, but many servers know them.
    extra = {"top_k": sampling.top_k, "min_p": sampling.min_p, "repetition_penalty": sampling.repetition}
    asked: dict[str, object] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "max_tokens": new_tokens,
        "stop": list(stop) or None,
        "extra_body": {name: value for name, value in extra.items() if value is not None} or None,
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
        print(HELP, file=sys.stderr)
    for line in lines if lines is not None else _lines():
        said = line.strip()
        if said in ("/exit", "/quit"):
            return
        if said == "/reset":
            messages = list(first)
        elif _COMMAND.fullmatch(said):
            print(HELP if said == "/help" else f"{said}: there is no such command. {HELP}", file=sys.stderr)
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
