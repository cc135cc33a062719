"""The requests of `vllm bench serve`, replayed: vLLM itself is not installed, as it would bring gigabytes.

Written after vllm/benchmarks/serve.py and lib/endpoint_request_func.py (2026-11): the model's name from /v1/models, the
prompts aligned by /tokenize and /detokenize, then streams over completions and chats, 16 at a time, read as that client
reads them. It counts a request as a success at its first chunk with choices, its tokens by the last usage.
"""

import asyncio
import json

import aiohttp
from cases import MODEL, URL, case

REQUESTS, AT_ONCE, TOKENS = 48, 16, 12
# --temperature, --top-p, --top-k, --min-p, --*-penalty and --ignore-eos are fields of every body.
SAMPLED = {"temperature": 0.0, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0}
EXTRA = {**SAMPLED, "frequency_penalty": 0.0, "presence_penalty": 0.0, "ignore_eos": True}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def body(path, prompt, logprobs=None):
    """What the client sends to a path; a number that is not given is null."""
    if path == "/v1/completions":
        asked = {"prompt": prompt, "repetition_penalty": 1.0, "max_tokens": TOKENS, "logprobs": logprobs}
    else:
        content = [{"type": "text", "text": prompt}]
        asked = {"messages": [{"role": "user", "content": content}], "max_completion_tokens": TOKENS}
    return {"model": MODEL, **asked, **STREAMED, **EXTRA}


async def streamed(session, path, asked, name):
    """Ask once. Return chunks with choices, and the prompt's and the answer's tokens."""
    chunks, counts, buffer = 0, (0, 0), ""
    async with session.post(URL + path, json=asked, headers={"x-request-id": name}) as response:
        assert response.status == 200, await response.text()
        async for piece in response.content.iter_any():
            buffer += piece.decode()
            *events, buffer = buffer.split("\n\n")
            for event in events:
                data = event.strip().removeprefix("data: ")
                if event.startswith(":") or data == "[DONE]":
                    continue
                found = json.loads(data)
                if found.get("choices"):
                    chunks += 1
                elif usage := found.get("usage"):
                    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    return chunks, *counts


async def benched(path, logprobs=None):
    limit = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE)) as session:

        async def one(n):
            async with limit:
                return await streamed(session, path, body(path, f"{n} The history of", logprobs), f"bench-{n}")

        for chunks, read, made in await asyncio.gather(*map(one, range(REQUESTS))):
            assert chunks and read > 0 and made == TOKENS, (chunks, read, made)


async def got(path, asked=None):
    async with aiohttp.ClientSession() as session:
        method = "GET" if asked is None else "POST"
        async with session.request(method, URL + path, json=asked) as response:
            response.raise_for_status()
            return await response.json(content_type=None) if path != "/metrics" else await response.text()


@case
def the_first_model() -> None:
    (model,) = asyncio.run(got("/v1/models"))["data"]
    assert model["id"] == MODEL and model["root"], model


@case
def prompts_are_aligned() -> None:
    asked = {"model": MODEL, "prompt": "The history of", "add_special_tokens": False}
    tokens = asyncio.run(got("/tokenize", asked))["tokens"]
    assert asyncio.run(got("/detokenize", {"model": MODEL, "tokens": tokens}))["prompt"] == "The history of"


@case
def completions() -> None:
    asyncio.run(benched("/v1/completions"))


@case
def completions_with_logprobs() -> None:
    asyncio.run(benched("/v1/completions", 2))


@case
def chats() -> None:
    asyncio.run(benched("/v1/chat/completions"))


@case
def metrics_of_speculation_are_absent_or_whole() -> None:
    lines = [line for line in asyncio.run(got("/metrics")).splitlines() if line.startswith("vllm:spec_decode")]
    assert all(line.split(None, 1)[1] for line in lines)
