// OpenAI's client for node: a chat, a stream with usage, a tool, Responses.
import { MODEL, URL_OF, check, load, test } from "./cases.mjs";

const { OpenAI } = await load("openai");
const client = new OpenAI({ baseURL: `${URL_OF}/v1`, apiKey: "none", maxRetries: 0, timeout: 120000 });
const messages = [{ role: "user", content: "The history of" }];
const parameters = {
  type: "object",
  properties: { zone: { type: "string", maxLength: 12 } },
  required: ["zone"],
  additionalProperties: false,
};

await test("chat", async () => {
  const made = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 16 });
  check(made.choices[0].message.content && made.usage.completion_tokens === 16, made);
});

await test("stream with usage", async () => {
  const asked = { model: MODEL, messages, max_tokens: 16, stream: true, stream_options: { include_usage: true } };
  let text = "";
  let last;
  for await (const chunk of await client.chat.completions.create(asked)) {
    text += chunk.choices[0]?.delta?.content ?? "";
    last = chunk;
  }
  check(text && last.usage.completion_tokens === 16, last);
});

await test("required tool", async () => {
  const tools = [{ type: "function", function: { name: "time", parameters } }];
  const asked = { model: MODEL, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 };
  const made = await client.chat.completions.create(asked);
  const call = made.choices[0].message.tool_calls[0].function;
  check(call.name === "time" && typeof JSON.parse(call.arguments).zone === "string", made);
});

await test("responses streamed", async () => {
  const asked = { model: MODEL, input: "The history of", max_output_tokens: 16, store: false, stream: true };
  const kinds = [];
  for await (const event of await client.responses.create(asked)) kinds.push(event.type);
  check(kinds[0] === "response.created" && kinds.at(-1) === "response.incomplete", kinds);
});

await test("errors have their class", async () => {
  const wrong = await client.chat.completions.create({ model: "another", messages }).catch((error) => error);
  check(wrong instanceof OpenAI.NotFoundError, String(wrong));
});
