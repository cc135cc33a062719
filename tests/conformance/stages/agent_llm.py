"""The command `llm` with a model of its extra-openai-models.yaml: texts, streams, usage, schemas, tools, errors."""

import json
import os
import subprocess
from pathlib import Path

from agent_cases import MODEL, SHORT, SYSTEM, V1, Report
from cases import BIN, case

home = Path("llm").absolute()
home.mkdir(exist_ok=True)
ABLE = {"can_stream": True, "supports_schema": True, "supports_tools": True, "api_base": V1, "api_key_name": "none"}
MODELS = [{"model_id": name, "model_name": name, **ABLE} for name in (MODEL, "another")]
(home / "extra-openai-models.yaml").write_text(json.dumps(MODELS))
TOOL = 'def weather(city: str) -> str:\n    """Get the current weather of a city."""\n    return "sunny"\n'
ALL = ("-m", MODEL, "-o", "max_tokens", "64", "-o", "temperature", "0", "--key", "none")


def told(*arguments, code=0):
    """Run the command; check its status."""
    done = subprocess.run(
        [str(BIN / "llm"), *arguments], capture_output=True, text=True, env={**os.environ, "LLM_USER_PATH": str(home)}
    )
    print(done.stdout, done.stderr)
    assert code is None or done.returncode == code, done.stderr
    return done


@case
def text_and_usage() -> None:
    done = told(SHORT, "-s", SYSTEM, *ALL, "--no-stream", "-u")
    assert done.stdout.strip() and "Token usage" in done.stderr and "output" in done.stderr, done.stderr


@case
def stream() -> None:
    done = told(SHORT, "-s", SYSTEM, *ALL, "-u")
    assert done.stdout.strip() and "output" in done.stderr, done.stderr


@case
def form() -> None:
    done = told(SHORT, *ALL, "--no-stream", "--schema", json.dumps(Report.model_json_schema()))
    Report.model_validate_json(done.stdout)


@case
def tool_beside_a_form() -> None:
    asked = ("--functions", TOOL, "--schema", json.dumps(Report.model_json_schema()), "--chain-limit", "2")
    done = told(SHORT, *ALL, *asked, code=None)
    assert not done.returncode or "Chain limit" in done.stderr, done.stderr  # it may call again and again


@case
def conversation() -> None:
    told(SHORT, *ALL)
    assert told("-c", SHORT, *ALL).stdout.strip()


@case
def errors() -> None:
    done = told(SHORT, "-m", "another", "--key", "none", code=1)
    assert "another" in done.stderr and "Traceback" not in done.stderr, done.stderr
