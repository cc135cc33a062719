// Vercel's AI SDK through its provider for compatible servers and those of OpenAI's Responses and Anthropic's Messages.
import { MODEL, URL_OF, check, load, test } from "./cases.mjs";

const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { generateText, jsonSchema, Output, stepCountIs, streamText, tool } = await load("ai");

const baseURL = `${URL_OF}/v1`;
const compatible = createOpenAICompatible({
  name: "moepack", baseURL, includeUsage: true, supportsStructuredOutputs: true,
});
const PROVIDERS = {
  chat: compatible,
  responses: createOpenAI({ baseURL, apiKey: "none" }).responses,
  messages: createAnthropic({ baseURL, apiKey: "none" }),
};
const schema = jsonSchema({
  type: "object",
  properties: { zone: { type: "string", enum: ["UTC", "CET"] } },
  required: ["zone"],
  additionalProperties: false,
});
const description = "The time in a zone";

for (const [name, provider] of Object.entries(PROVIDERS)) {
  const asked = { model: provider(MODEL), prompt: "The history of", maxRetries: 0 };

  await test(`text ${name}`, async () => {
    const { text, usage } = await generateText({ ...asked, maxOutputTokens: 16 });
    check(text && usage.outputTokens === 16 && usage.inputTokens > 0, usage);
  });

  await test(`stream ${name}`, async () => {
    const made = streamText({ ...asked, maxOutputTokens: 16 });
    let text = "";
    for await (const part of made.textStream) text += part;
    check(text && (await made.usage).outputTokens === 16, await made.usage);
  });

  await test(`required tool ${name}`, async () => {
    const tools = { time: tool({ description, inputSchema: schema }) };
    const made = await generateText({ ...asked, tools, toolChoice: "required", maxOutputTokens: 400 });
    check(made.toolCalls[0].toolName === "time" && typeof made.toolCalls[0].input.zone === "string", made.toolCalls);
  });

  await test(`required tool and its result, streamed ${name}`, async () => {
    const tools = { time: tool({ description, inputSchema: schema, execute: async () => "noon" }) };
    const limits = { maxOutputTokens: 100, stopWhen: stepCountIs(2) };
    const made = streamText({ ...asked, ...limits, tools, toolChoice: { type: "tool", toolName: "time" } });
    const steps = await made.steps;
    check(steps.length === 2 && steps[0].toolResults[0].output === "noon", steps.length);
  });

  await test(`object beside a strict tool ${name}`, async () => {
    const tools = { time: tool({ description, inputSchema: schema, strict: true, execute: async () => "noon" }) };
    const made = await generateText({ ...asked, tools, output: Output.object({ schema }), maxOutputTokens: 100 });
    check(made.toolCalls.length || ["UTC", "CET"].includes(made.output.zone), made.text);
  });

  await test(`object by a schema ${name}`, async () => {
    const made = await generateText({ ...asked, output: Output.object({ schema }), maxOutputTokens: 200 });
    check(["UTC", "CET"].includes(made.output.zone), made.output);
  });

  await test(`errors ${name}`, async () => {
    const wrong = await generateText({ ...asked, model: provider("another") }).catch((error) => error);
    check(wrong.statusCode === 404 && wrong.message.includes("another"), String(wrong));
  });
}
