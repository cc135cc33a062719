"""What answers cost: tokens and seconds of prompts and of decoding, for a line at the end and for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .shared.memory import peak_memory
from .shared.progress import size


@dataclass(slots=True)
class Spent:
    """The tokens and seconds of a session's answers, added up."""

    answers: int = 0
    prompt_tokens: int = 0  # that were read; a chat's cache has the others
    prompt_seconds: float = 0.0  # up to the first token of each answer
    decoded_tokens: int = 0  # those after the first of each answer
    decode_seconds: float = 0.0

    def read(self, tokens: int, seconds: float) -> None:
        """Add a prompt, and the first token of its answer."""
        self.answers += 1
        self.prompt_tokens += tokens
        self.prompt_seconds += seconds

    def decoded(self, tokens: int, seconds: float) -> None:
        """Add an answer's tokens after its first."""
        self.decoded_tokens += tokens
        self.decode_seconds += seconds

    def facts(self, model: Any) -> dict[str, Any]:
        """Return rates, the seconds to an answer's first token, the experts' versions and peaks in bytes, for JSON.

        A rate is None where nothing was measured. `experts` counts the experts of each version now, and
        `device_bytes_peak` is the most of the budget, or of weights, in use; a checkpoint has none and null.
        """
        serving = getattr(model, "moepack", None)
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_per_second": rate(self.prompt_tokens, self.prompt_seconds),
            "first_token_seconds": self.prompt_seconds / self.answers if self.answers else None,
            "new_tokens": self.answers + self.decoded_tokens,
            "tokens_per_second": rate(self.decoded_tokens, self.decode_seconds),
            "experts": {} if serving is None else serving.by_version,
            "device_bytes_peak": None if serving is None else serving.resident_bytes_peak,
            "process_bytes_peak": peak_memory(),
        }


def rate(count: float, seconds: float) -> float | None:
    """Return a count a second; None for none, or for no time."""
    return count / seconds if count and seconds > 0 else None


def line(facts: dict[str, Any]) -> str:
    """Return the facts as a line."""

    def shown(tokens: int, tokens_per_second: float | None) -> str:
        return f"{tokens:,} tokens" + ("" if tokens_per_second is None else f" at {tokens_per_second:,.1f}/s")

    words = [f"prompt {shown(facts['prompt_tokens'], facts['prompt_tokens_per_second'])}"]
    if facts["first_token_seconds"] is not None:
        words.append(f"first token after {facts['first_token_seconds']:.2f} s")
    words.append(f"answer {shown(facts['new_tokens'], facts['tokens_per_second'])}")
    if total := sum(facts["experts"].values()):
        words.append("experts " + ", ".join(f"{count / total:.0%} {name}" for name, count in facts["experts"].items()))
    if facts["device_bytes_peak"] is not None:
        words.append(f"peak {size(facts['device_bytes_peak'])} of weights and caches")
    words.append(f"{size(facts['process_bytes_peak'])} of the process")
    return "; ".join(words)
