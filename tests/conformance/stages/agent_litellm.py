"""LiteLLM: its SDK through each provider that fits, and its proxy before the server, asked in all three interfaces."""

import json
import os
import secrets
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import anthropic
import litellm
import openai
from agent_cases import ASKED, MODEL, SHORT, SYSTEM, URL, V1, Report, each, raises
from cases import BIN, case

SAID = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": SHORT}]
FUNCTION = {"name": "weather", "description": "The weather of a city", "strict": True}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}}]
PROVIDERS = {
    "openai": {"model": f"openai/{MODEL}", "api_base": V1},
    "hosted vllm": {"model": f"hosted_vllm/{MODEL}", "api_base": V1},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL},
}
ALL = {"api_key": "none", "max_tokens": 64, "temperature": 0, "num_retries": 0}


def asked(to, words=SHORT, **more):
    messages = [SAID[0], {"role": "user", "content": words}]
    return litellm.completion(**{**ALL, "messages": messages, **to, **more})


@each(**PROVIDERS)
def text(to: dict[str, str]) -> None:
    made = asked(to)
    assert made.choices[0].message.content and made.choices[0].finish_reason == "stop", made
    assert 0 < made.usage.completion_tokens < 64 and made.usage.prompt_tokens > 0, made.usage


@each(**PROVIDERS)
def stream(to: dict[str, str]) -> None:
    chunks = list(asked(to, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text and any(getattr(c, "usage", None) and c.usage.completion_tokens for c in chunks), chunks


@each(**PROVIDERS)
def required_tool_and_its_result(to: dict[str, str]) -> None:
    made = asked(to, ASKED, tools=TOOLS, tool_choice="required").choices[0].message
    call = made.tool_calls[0]
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo"), made
    made.tool_calls = made.tool_calls[:1]
    result = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "sunny"}
    given = [*SAID[:1], {"role": "user", "content": ASKED}, made, result]
    again = litellm.completion(**{**ALL, **to, "messages": given, "tools": TOOLS})
    assert again.choices[0].message.content or again.choices[0].message.tool_calls


@each(**PROVIDERS)
def form_beside_a_strict_tool(to: dict[str, str]) -> None:
    made = asked(to, ASKED, tools=TOOLS, response_format=Report).choices[0].message
    if not made.tool_calls:
        Report.model_validate_json(made.content)


@case
def responses() -> None:
    made = litellm.responses(**PROVIDERS["openai"], input=ASKED, max_output_tokens=16, api_key="none")
    assert made.output and made.usage.output_tokens > 0, made


@case
def completions() -> None:
    made = litellm.text_completion(**PROVIDERS["openai"], prompt="The", max_tokens=8, api_key="none")
    assert made.choices[0].text


@each(**PROVIDERS)
def errors(to: dict[str, str]) -> None:
    raises(litellm.NotFoundError, lambda: asked({**to, "model": to["model"].replace(MODEL, "another")}), "another")
    raises(litellm.BadRequestError, lambda: asked(to, temperature=101), "temperature")
    raises(litellm.ContextWindowExceededError, lambda: asked(to, "word " * 70000))


KEY = f"sk-{secrets.token_hex(16)}"  # the proxy starts with none that is weak


def proxy():
    """Start the proxy on a free port, and wait until it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = {"model_name": MODEL, "litellm_params": {**PROVIDERS["openai"], "api_key": "none"}}
    config = Path("litellm.yaml")
    config.write_text(json.dumps({"model_list": [served], "general_settings": {"master_key": KEY}}))
    command = [str(BIN / "litellm"), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    process = subprocess.Popen(command, env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"})
    address = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{address}/health/liveliness", timeout=5)
            return process, address
        except OSError:
            assert process.poll() is None, "the proxy ended"
            time.sleep(0.5)
    raise AssertionError("the proxy does not answer")


process, address = proxy()
client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=300)


@case
def proxy_chat_streamed() -> None:
    given = {"model": MODEL, "messages": SAID, "max_tokens": 64, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**given, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage.completion_tokens > 0, chunks[-1]


@case
def proxy_required_tool() -> None:
    given = {"model": MODEL, "messages": SAID, "max_tokens": 64, "tools": TOOLS, "tool_choice": "required"}
    made = client.chat.completions.create(**given)
    assert made.choices[0].message.tool_calls[0].function.name == "weather", made


@case
def proxy_form() -> None:
    made = client.chat.completions.parse(model=MODEL, messages=SAID, max_tokens=64, response_format=Report)
    assert isinstance(made.choices[0].message.parsed, Report)


@case
def proxy_responses() -> None:
    made = client.responses.create(model=MODEL, input=ASKED, max_output_tokens=16)
    assert made.usage.output_tokens > 0, made


@case
def proxy_messages() -> None:
    asks = anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0, timeout=300)
    made = asks.messages.create(model=MODEL, max_tokens=64, system=SYSTEM, messages=SAID[1:])
    assert made.content[0].text and made.usage.output_tokens > 0, made


@case
def proxy_errors() -> None:
    given = {"model": MODEL, "messages": SAID, "extra_body": {"top_p": 7}}
    raises(openai.BadRequestError, lambda: client.chat.completions.create(**given), "top_p")


process.terminate()
process.wait(60)
