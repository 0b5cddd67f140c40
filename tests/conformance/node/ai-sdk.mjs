// The AI SDK over its OpenAI-compatible provider: node ai-sdk.mjs URL MODEL KEY. Prints what tour.mjs reports.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, streamText, tool } from "ai";
import { z } from "zod";
import { Animal, report, served } from "./tour.mjs";

const { url, model: name, key } = served();
const provide = (apiKey) =>
  createOpenAICompatible({ name: "disagg", baseURL: url, apiKey, includeUsage: true, supportsStructuredOutputs: true });
const model = provide(key)(name);
const ask = { model, prompt: "the quick brown fox", maxOutputTokens: 8, temperature: 0, maxRetries: 0 };
const move = tool({ description: "go", inputSchema: z.object({ direction: z.enum(["left", "right"]) }) });

await report("ai-sdk", "ai", {
  async generate() {
    const answer = await generateText(ask);
    assert.ok(answer.usage.inputTokens > 0);
    assert.ok(["stop", "length"].includes(answer.finishReason));
  },
  async stream() {
    const whole = await generateText(ask);
    const errors = [];
    const answer = streamText({ ...ask, onError: ({ error }) => errors.push(error) });
    let text = "";
    for await (const part of answer.textStream) text += part;
    assert.deepEqual(errors, []);
    assert.equal(text, whole.text);
    assert.equal((await answer.usage).outputTokens, whole.usage.outputTokens);
  },
  async structured() {
    const answer = await generateText({ ...ask, maxOutputTokens: 200, output: Output.object({ schema: Animal }) });
    Animal.parse(answer.output);
  },
  async tools() {
    const answer = await generateText({ ...ask, maxOutputTokens: 300, tools: { move }, toolChoice: "required" });
    assert.equal(answer.finishReason, "tool-calls");
    assert.ok(["left", "right"].includes(answer.toolCalls[0].input.direction));
  },
  async toolsStreamed() {
    const answer = streamText({
      ...ask, maxOutputTokens: 300, tools: { move }, toolChoice: { type: "tool", toolName: "move" },
      onError: ({ error }) => { throw error; },
    });
    await answer.consumeStream();
    assert.ok(["left", "right"].includes((await answer.toolCalls)[0].input.direction));
  },
  async errors() {
    await assert.rejects(generateText({ ...ask, model: provide(key)("none") }), (error) => error.statusCode === 404);
    await assert.rejects(generateText({ ...ask, model: provide("nobody-knows-it")(name) }), (error) => error.statusCode === 401);
  },
});
