// openai-node against a served model: node openai.mjs URL MODEL KEY. Prints what tour.mjs reports.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { Animal, MOVE, report, served } from "./tour.mjs";

const { url, model, key } = served();
const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "the quick brown fox" }];
const ask = { model, messages, max_tokens: 8, temperature: 0 };

await report("openai-node", "openai", {
  async models() {
    const found = [];
    for await (const each of client.models.list()) found.push(each.id);
    assert.deepEqual(found, [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
  },
  async chat() {
    const answer = await client.chat.completions.create(ask);
    assert.equal(typeof answer.choices[0].message.content, "string");
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
    assert.ok(answer._request_id);
  },
  async chatStream() {
    const whole = await client.chat.completions.create(ask);
    const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
    let text = "";
    let usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);
  },
  async completions() {
    const answer = await client.completions.create({ model, prompt: [[5, 6, 7], [8, 9]], max_tokens: 2, logprobs: 2, echo: true });
    assert.deepEqual(answer.choices.map((each) => each.index), [0, 1]);
    assert.equal(answer.choices[0].logprobs.token_logprobs[0], null);
  },
  async parse() {
    const format = zodResponseFormat(Animal, "animal");
    const answer = await client.chat.completions.parse({ ...ask, max_tokens: 200, response_format: format });
    Animal.parse(answer.choices[0].message.parsed);
  },
  async toolsStreamed() {
    const tools = [{ type: "function", function: MOVE }];
    const stream = client.chat.completions.stream({
      ...ask, max_tokens: 200, tools, tool_choice: "required", parallel_tool_calls: false,
    });
    const message = await stream.finalMessage();
    assert.equal(message.tool_calls[0].function.name, MOVE.name);
    assert.ok(["left", "right"].includes(JSON.parse(message.tool_calls[0].function.arguments).direction));
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ ...ask, model: "none" }), OpenAI.NotFoundError);
    await assert.rejects(client.chat.completions.create({ ...ask, temperature: 9 }), OpenAI.BadRequestError);
    const stranger = new OpenAI({ baseURL: url, apiKey: "nobody-knows-it", maxRetries: 0 });
    await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
  },
  async abort() {
    const stream = await client.chat.completions.create({ ...ask, max_tokens: 2000, stream: true });
    for await (const chunk of stream) if (chunk.choices[0]?.delta?.content) break;
    assert.ok(stream.controller.signal.aborted);
  },
});
