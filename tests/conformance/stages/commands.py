"""Programs that are commands: each is run as its manual says, and its own report is read into cases.

Usage: commands.py KIND [ARGUMENT ...], for the kinds at the end of this file.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from cases import BIN, BUNDLE, MODEL, URL, say

REQUESTS, PROMPT, ANSWER = 200, 32, 16  # requests, and tokens of each


def told(*command, without=()):
    """Run a command of the environment, without some variables, show what it says, and return its standard output."""
    given = {name: value for name, value in os.environ.items() if name not in without}
    done = subprocess.run([str(BIN / command[0]), *command[1:]], stdout=subprocess.PIPE, text=True, env=given)
    print(done.stdout, f"{command[0]} ended with {done.returncode}", sep="\n", flush=True)
    return done.stdout


def guidellm(streams):
    """Chats, streamed, so many at a time."""
    report = Path(f"guidellm-{streams}.json")
    told(
        "guidellm", "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={URL},model={MODEL},request_format=/v1/chat/completions",
        "--profile", f"kind=concurrent,streams={streams}", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={BUNDLE}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}",
        "--output", f"kind=json,path={report}",
    )  # fmt: skip
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    done = totals["successful"] == REQUESTS and not totals["errored"]
    say(f"{REQUESTS} requests", done, json.dumps(totals))


def aiperf(streams):
    """Chats, streamed, so many at a time. Told to be offline, it takes the tokenizer's folder for a name on the Hub."""
    report = Path(f"aiperf-{streams}")
    told(
        "aiperf", "profile", "--model", MODEL, "--url", URL, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", BUNDLE, "--concurrency", streams, "--request-count", str(REQUESTS), "--ui", "none",
        "--synthetic-input-tokens-mean", str(PROMPT), "--output-tokens-mean", str(ANSWER),
        # An answer that ends at once is none to it.
        "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(report),
        without=("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    )  # fmt: skip
    (found,) = report.rglob("profile_export_aiperf.json")
    export = json.loads(found.read_text())
    count = export["request_count"]["avg"]
    why = f"{count:.0f} requests succeeded: {export.get('error_summary')}"
    say(f"{REQUESTS} requests", count == REQUESTS and not export.get("error_summary"), why)


def comply(form):
    """The cases of one interface; what it skips for the model's name is no case."""
    key = ["--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"]
    out = told(
        "llm-comply", "--format", form, "--json", "--timeout", "180", "-u", f"{URL}/v1", "-k", "none", "-m", MODEL,
        *(key if form == "anthropic" else ()),
    )  # fmt: skip
    for result in json.loads(out[out.index("{") :])["results"]:
        if result["status"] != "skipped":
            say(result["id"], result["status"] == "passed", "; ".join(result.get("errors", []))[:300])


def schemathesis(most):
    """Requests made from /openapi.json, right and wrong ones, so many at most for a path: no answer is a 5xx."""
    out = told(
        "schemathesis", "run", f"{URL}/openapi.json", "--phases", "fuzzing", "--checks", "not_a_server_error",
        "--max-examples", most, "--seed", "1", "--workers", "4", "--request-timeout", "120", "--no-shrink",
        "--no-color", "--generation-database", "none",
    )  # fmt: skip
    found = re.search(r"([\d,]+) generated, ([\d,]+) passed", out)
    assert found is not None, "it counted no test cases"
    say(f"{found[1]} requests", found[1] == found[2] and "Errors:" not in out, " ".join(out.split())[-300:])


if __name__ == "__main__":
    {f.__name__: f for f in (guidellm, aiperf, comply, schemathesis)}[sys.argv[1]](*sys.argv[2:])
