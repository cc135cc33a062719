"""A tokenizer in a GGUF file: byte-level BPE whose way of cutting text llama.cpp knows by a name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5  # types of tokens
# The expression that cuts text before BPE -> llama.cpp's name for it; None is GPT-2's own.
_CUTS = {
    None: "gpt-2",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+"
    "|\\s+(?!\\S)|\\s+": "qwen2",
}


def tokenizer(path: Path, vocabulary: int) -> dict[str, Any] | None:
    """The keys of a directory's tokenizer; None without one, or if no name of how it cuts text is known here."""
    try:
        document = json.loads((path / "tokenizer.json").read_text())
        settings = json.loads((path / "tokenizer_config.json").read_text())
        model, cut = document["model"], _cut(document["pre_tokenizer"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if model.get("type") != "BPE" or cut not in _CUTS:
        return None
    words = {number: (word, _NORMAL) for word, number in model["vocab"].items()}
    for token in document.get("added_tokens", ()):
        words[token["id"]] = token["content"], _CONTROL if token.get("special") else _USER
    unused = [words.get(i, (f"[PAD{i}]", _UNUSED)) for i in range(vocabulary)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    numbers = {word: number for number, (word, _) in words.items()}
    out: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _CUTS[cut],
        "tokenizer.ggml.tokens": [word for word, _ in unused],
        "tokenizer.ggml.token_type": [kind for _, kind in unused],
        "tokenizer.ggml.merges": merges,
    }
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        found = settings.get(name)
        found = found.get("content") if isinstance(found, dict) else found
        if found in numbers:
            out[f"tokenizer.ggml.{key}_token_id"] = numbers[found]
    out["tokenizer.ggml.add_bos_token"] = bool(settings.get("add_bos_token", False))
    template = path / "chat_template.jinja"
    chat = template.read_text() if template.exists() else settings.get("chat_template")
    return out | ({"tokenizer.chat_template": chat} if isinstance(chat, str) else {})


def _cut(pre: dict[str, Any]) -> Any:
    """The expression of a pre-tokenizer; None of ByteLevel's own; False of another kind."""
    if pre["type"] == "ByteLevel":
        return None if pre.get("use_regex", True) else False
    parts = pre.get("pretokenizers", ())
    if pre["type"] == "Sequence" and [p["type"] for p in parts] == ["Split", "ByteLevel"]:
        return parts[0]["pattern"].get("Regex", False)
    return False
