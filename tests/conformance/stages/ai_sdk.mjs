// Vercel's AI SDK through its provider for compatible servers: a text, a stream, a tool, an object by a schema.
import { MODEL, URL_OF, check, load, test } from "./cases.mjs";

const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { generateText, jsonSchema, Output, streamText, tool } = await load("ai");
const provider = createOpenAICompatible({
  name: "moepack", baseURL: `${URL_OF}/v1`, includeUsage: true, supportsStructuredOutputs: true,
});
const asked = { model: provider(MODEL), prompt: "The history of", maxRetries: 0 };
const schema = jsonSchema({
  type: "object",
  properties: { zone: { type: "string", maxLength: 12 } },
  required: ["zone"],
  additionalProperties: false,
});

await test("text", async () => {
  const made = await generateText({ ...asked, maxOutputTokens: 16 });
  check(made.text && made.usage.outputTokens === 16, made.usage);
});

await test("stream", async () => {
  const made = streamText({ ...asked, maxOutputTokens: 16 });
  let text = "";
  for await (const part of made.textStream) text += part;
  check(text && (await made.usage).outputTokens === 16, await made.usage);
});

await test("required tool", async () => {
  const tools = { time: tool({ description: "The time in a zone", inputSchema: schema }) };
  const made = await generateText({ ...asked, tools, toolChoice: "required", maxOutputTokens: 400 });
  check(made.toolCalls[0].toolName === "time" && typeof made.toolCalls[0].input.zone === "string", made.toolCalls);
});

await test("required tool streamed", async () => {
  const tools = { time: tool({ description: "The time in a zone", inputSchema: schema }) };
  const made = streamText({ ...asked, tools, toolChoice: "required", maxOutputTokens: 400 });
  const calls = await made.toolCalls;
  check(typeof calls[0].input.zone === "string", calls);
});

await test("object by a schema", async () => {
  const made = await generateText({ ...asked, output: Output.object({ schema }), maxOutputTokens: 200 });
  check(typeof made.output.zone === "string", made.output);
});
