// Agents in a terminal, with their own first request (some 20,000 tokens of it Claude Code's): what a person sees.
import { spawnSync } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";

import { MODEL, URL_OF, check, test } from "./cases.mjs";

const home = resolve("terminal");
const bin = join(dirname(process.env.CONFORMANCE_BIN), "node_modules", ".bin");
const TOKENS = 48; // the most of an answer
const { PATH } = process.env;

// Runs a program in a home of its own; returns its status and what it said.
function told(program, args, env) {
  mkdirSync(home, { recursive: true });
  const given = { PATH, HOME: home, ...env };
  const done = spawnSync(join(bin, program), args, { cwd: home, env: given, encoding: "utf8", input: "" });
  console.log(done.stdout, done.stderr);
  return { code: done.status, out: done.stdout, all: done.stdout + done.stderr };
}

function claude(model, words) {
  const env = {
    ANTHROPIC_BASE_URL: URL_OF, ANTHROPIC_API_KEY: "none", ANTHROPIC_MODEL: model,
    CLAUDE_CODE_MAX_OUTPUT_TOKENS: String(TOKENS), CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    CLAUDE_CODE_MAX_RETRIES: "0", API_TIMEOUT_MS: "1200000",
  };
  return told("claude", ["-p", words, "--output-format", "json", "--max-turns", "1"], env);
}

function opencode(model, words) {
  const made = { name: model, limit: { context: 40000, output: TOKENS }, tool_call: true };
  const options = { baseURL: `${URL_OF}/v1`, apiKey: "none" };
  const provider = { npm: "@ai-sdk/openai-compatible", name: "moepack", options, models: { [model]: made } };
  const named = `moepack/${model}`;
  mkdirSync(home, { recursive: true });
  const config = { model: named, small_model: named, autoupdate: false, share: "disabled", provider: { moepack: provider } };
  writeFileSync(join(home, "opencode.json"), JSON.stringify(config));
  const env = { OPENCODE_DISABLE_MODELS_FETCH: "1", OPENCODE_DISABLE_AUTOUPDATE: "1" };
  return told("opencode", ["run", "--format", "json", words], env);
}

const CASES = {
  claude: async () => {
    await test("first request", () => {
      const { result, usage } = JSON.parse(claude(MODEL, "Hello").out);
      const read = usage.input_tokens + usage.cache_read_input_tokens;
      check(result && read > 4000 && usage.output_tokens > 0, { result, usage });
    });
    await test("errors", () => {
      const { is_error, result } = JSON.parse(claude("another", "Hello").out);
      check(is_error && result.includes("another"), result);
    });
  },
  opencode: async () => {
    await test("first request", () => {
      const events = opencode(MODEL, "Hello").out.trim().split("\n").map((line) => JSON.parse(line));
      const done = events.find((event) => event.type === "step_finish");
      check(done && done.part.tokens.output > 0, events.at(-1));
    });
    await test("errors", () => check(opencode("another", "Hello").all.includes("another"), "it does not name the model"));
  },
};
await CASES[process.argv[2]]();
