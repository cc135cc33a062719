"""What a program asks of `moepack serve`, with OpenAI's own client: `python client.py URL MODEL`, or with the defaults.

Install the client with `pip install openai`. A server that was started with a key gets it from OPENAI_API_KEY.
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
model = sys.argv[2] if len(sys.argv) > 2 else "my-bundle"
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
print("models:", ", ".join(found.id for found in client.models.list()))

# A text, token by token, reproducible by its seed.
for piece in client.completions.create(
    model=model, prompt="The history of", max_tokens=24, temperature=0.8, seed=1, stream=True
):
    print(piece.choices[0].text, end="", flush=True)
print()

# Three at once, which share the server's forward passes, each up to the end of its sentence.
out = client.completions.create(model=model, prompt="The history of", max_tokens=24, n=3, seed=1, stop=".")
for choice in out.choices:
    print(f"{choice.index} ({choice.finish_reason}):{choice.text}")

# How likely the model finds a text.
out = client.completions.create(model=model, prompt="The history of the world", max_tokens=0, echo=True, logprobs=0)
scored = out.choices[0].logprobs
assert scored is not None and scored.tokens is not None and scored.token_logprobs is not None
for token, logprob in zip(scored.tokens, scored.token_logprobs, strict=True):
    print(f"{token!r}: {'-' if logprob is None else format(logprob, '.2f')}")
