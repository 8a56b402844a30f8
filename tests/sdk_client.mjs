// What the openai package for Node does with a daemon: node tests/sdk_client.mjs BASE_URL
// It is found from the working directory.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { strict as assert } from "node:assert";

const find = createRequire(process.cwd() + "/");
const { default: OpenAI } = await import(pathToFileURL(find.resolve("openai")));
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const ask = { model: "any", messages: [{ role: "user", content: "hello" }], max_tokens: 12, seed: 1 };

const whole = await client.chat.completions.create(ask);
const text = whole.choices[0].message.content;
const stream = client.chat.completions.stream({ ...ask, stream_options: { include_usage: true } });
let heard = "";
stream.on("content", (delta) => (heard += delta));
const final = await stream.finalChatCompletion();
assert.equal(final.choices[0].message.content, text);
assert.equal(heard, text);
assert.equal(final.usage.completion_tokens, 12);
const asked = { model: "any", input: "hello", max_output_tokens: 200, seed: 1, stop: ["z"] };
const response = await client.responses.create(asked);
let said = "";
const responses = client.responses.stream(asked);
responses.on("response.output_text.delta", (event) => (said += event.delta));
const finished = await responses.finalResponse();
assert.equal(finished.output_text, response.output_text);
assert.equal(said, response.output_text);
const cut = await client.responses.stream({ ...asked, stop: [], max_output_tokens: 3 }).finalResponse();
assert.equal(cut.incomplete_details.reason, "max_output_tokens");
await assert.rejects(client.chat.completions.create({ ...ask, temperature: -1 }), { param: "temperature" });
const left = await client.chat.completions.create({ ...ask, max_tokens: 800, stream: true });
for await (const chunk of left) break;
console.log("ok");
