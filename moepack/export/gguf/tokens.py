"""A tokenizer in a GGUF file: byte-level BPE whose way of cutting text llama.cpp knows by a name."""

from __future__ import annotations

import json
from pathlib import Path

from moepack.pack.manifest.strict_json import JsonObject

# types of tokens
_NORMAL = 1
_CONTROL = 3
_USER = 4
_UNUSED = 5
# The expression that cuts text before BPE -> llama.cpp's name for it; None is GPT-2's own.
_CUTS = {
    None: "gpt-2",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+"
    "|\\s+(?!\\S)|\\s+": "qwen2",
}


def tokenizer(path: Path, vocabulary: int) -> JsonObject | None:
    """The keys of a directory's tokenizer; None without one, or if no name of how it cuts text is known here."""
    try:
        document = json.loads((path / "tokenizer.json").read_text())
        settings = json.loads((path / "tokenizer_config.json").read_text())
        template = path / "chat_template.jinja"
        chat = template.read_text() if template.exists() else settings.get("chat_template")
        return _keys(document, settings, chat, vocabulary)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _keys(document: JsonObject, settings: JsonObject, chat: object, vocabulary: int) -> JsonObject | None:
    model = document["model"]
    cut = _cut(document["pre_tokenizer"])
    odd = any(model.get(part) for part in ("continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"))
    normal = document.get("normalizer") or {"type": "NFC"}  # llama.cpp takes text as it is given
    if model.get("type") != "BPE" or odd or cut not in _CUTS or normal["type"] != "NFC":
        return None
    words = {number: (word, _NORMAL) for word, number in model["vocab"].items()}
    for token in document.get("added_tokens", ()):
        words[token["id"]] = token["content"], _CONTROL if token.get("special") else _USER
    unused = [words.get(i, (f"[PAD{i}]", _UNUSED)) for i in range(vocabulary)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    numbers = {word: number for number, (word, _) in words.items() if number < vocabulary}
    out: JsonObject = {
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
    return out | ({"tokenizer.chat_template": chat} if isinstance(chat, str) else {})


def _cut(pre: JsonObject) -> object:
    """The expression of a pre-tokenizer; None of ByteLevel's own; False of another kind."""
    first, *others = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    level = others[0] if others else first
    whole = level["type"] == "ByteLevel" and not level.get("add_prefix_space", True)
    if not whole or len(others) > 1 or level.get("use_regex", True) is bool(others):
        return False
    if not others:
        return None
    same = first["type"] == "Split" and first["behavior"] == "Isolated" and not first["invert"]
    return first["pattern"].get("Regex", False) if same else False
