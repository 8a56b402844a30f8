// What the VS Code extension asks the daemon for, without VS Code: run by test_editors.py.
import { createRequire } from "node:module";
import assert from "node:assert/strict";

const [, , api, url] = process.argv;
const { Refused, chat, codeOf, complete } = createRequire(import.meta.url)(api);
const daemon = { url, key: "" };
const messages = [{ role: "user", content: "Hello" }];

let text = "";
let parts = 0;
for await (const part of chat(daemon, "ask", messages)) {
  text += part;
  if (++parts === 4) break; // a reader that leaves ends its request
}
assert.equal(parts, 4);
assert.ok(text);

assert.equal(typeof (await complete(daemon, "def f(", 4)), "string");

await assert.rejects(complete(daemon, "x", "many"), Refused);

const controller = new AbortController();
const stopped = (async () => {
  for await (const _ of chat(daemon, "refactor", messages, controller.signal)) controller.abort();
})();
await assert.rejects(stopped, { name: "AbortError" });

assert.equal(codeOf("Here it is:\n```js\nlet a = 1;\n```\nDone."), "let a = 1;");
assert.equal(codeOf(" let a = 1;\n"), "let a = 1;");

