"""The stages of `make conformance`: which program, how its version is found, what runs it and for how long."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Stage:
    """One program. Its script appends a JSON line for each case to the file $CONFORMANCE_OUT: name, ok, why."""

    name: str  # for --only, and in known.yaml
    program: str  # the distribution, or the package of npm
    what: str  # one line of the table
    script: str
    seconds: float  # after which it is ended
    arguments: tuple[str, ...] = ()
    budget: str = "8MB"  # --device-memory of the server
    replayed: str = ""  # the commit of its source after which the script sends its requests: it is not installed

    @property
    def node(self):
        """Whether it is a program of npm's."""
        return self.script.endswith(".mjs")

    @property
    def missing(self):
        """Why it did not run, where `version` or `command` found nothing."""
        return "not run: node is not here" if self.node and shutil.which("node") is None else "not run: not installed"

    def bin(self, environment):
        """Where its commands are: agent frameworks have an environment of their own."""
        return environment / ("agents" if self.script.startswith("agent_") else "") / "bin"

    def version(self, environment):
        """The version of the program in the environment; None if it is not there."""
        if self.replayed:
            return self.replayed
        if self.node:
            found = environment / "node_modules" / self.program / "package.json"
            return str(json.loads(found.read_text())["version"]) if found.exists() else None
        code = f"import importlib.metadata as m; print(m.version({self.program!r}))"
        python = self.bin(environment) / "python"
        if not python.exists():
            return None
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
        return done.stdout.strip() or None

    def command(self, environment):
        """What runs it; None without its interpreter."""
        runner = shutil.which("node") if self.node else str(self.bin(environment) / "python")
        return None if runner is None else [runner, str(HERE / self.script), *self.arguments]


STAGES = (
    Stage("openai", "openai", "chats, streams, tools (200 required calls), Responses", "openai_client.py", 600),
    Stage("anthropic", "anthropic", "Messages, streams, tools, counting", "anthropic_client.py", 300),
    Stage(
        "schemathesis", "schemathesis", "up to 100 requests a path by /openapi.json: no 5xx", "commands.py", 600,
        ("schemathesis", "100"),
    ),
    Stage("guidellm-4", "guidellm", "chats, 4 at a time", "commands.py", 900, ("guidellm", "4")),
    Stage("guidellm-16", "guidellm", "chats, 16 at a time", "commands.py", 900, ("guidellm", "16")),
    Stage("aiperf-4", "aiperf", "chats, 4 at a time", "commands.py", 900, ("aiperf", "4")),
    Stage("aiperf-16", "aiperf", "chats, 16 at a time", "commands.py", 900, ("aiperf", "16")),
    Stage("comply-chat", "llm-comply", "its cases of chats", "commands.py", 600, ("comply", "openai-chat")),
    Stage("comply-responses", "llm-comply", "its cases of Responses", "commands.py", 600, ("comply", "open-responses")),
    Stage("comply-messages", "llm-comply", "its cases of Messages", "commands.py", 600, ("comply", "anthropic")),
    Stage("langchain", "langchain-openai", "the standard tests of a chat model", "langchain_standard.py", 900),
    Stage("lm-eval", "lm-eval", "a task of choices and one of texts, over completions", "evaluation.py", 300),
    *(
        Stage(f"models-{family}", "transformers", f"its tests of a model: {family}", "model_tests.py", 900, (family,))
        for family in ("qwen3_moe", "deepseek_v3", "gpt_oss")
    ),
    Stage("openai-node", "openai", "chats, streams, tools, Responses, on node", "openai_node.mjs", 300),
    Stage("ai-sdk", "ai", "texts, streams, tools, an object by a schema, in three interfaces", "ai_sdk.mjs", 600),
    *(
        Stage(name, program, "its first request, an error", "terminal.mjs", 1800, (name,), "1GB")
        for name, program in (("claude", "@anthropic-ai/claude-code"), ("opencode", "opencode-ai"))
    ),
    Stage("openai-agents", "openai-agents", "runs, in chats and Responses", "agent_openai.py", 600),
    Stage("pydantic-ai", "pydantic-ai-slim", "runs, in three interfaces", "agent_pydantic.py", 600),
    Stage("instructor", "instructor", "objects, whole and in parts, in three interfaces", "agent_instructor.py", 600),
    Stage("litellm", "litellm", "runs, by three providers and by its proxy", "agent_litellm.py", 900),
    Stage("smolagents", "smolagents", "runs, in chats", "agent_smolagents.py", 600, (), "1GB"),
    Stage("llm", "llm", "its command: texts, streams, usage, schemas, tools", "agent_llm.py", 600),
    Stage("haystack", "haystack-ai", "runs, in chats and Responses", "agent_haystack.py", 600),
    Stage("autogen", "autogen-ext", "runs, in chats", "agent_autogen.py", 600),
    Stage("vllm-bench", "vllm bench serve", "its requests, replayed", "vllm_bench.py", 600, replayed="02cfb534"),
)  # fmt: skip
