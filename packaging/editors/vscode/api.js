// The daemon's HTTP API: requests of a lane, answers as they are generated.
"use strict";

/** What each use of the daemon asks for: its lane and, where somebody waits, times in milliseconds. */
const USES = {
  completion: { "X-UMA-Priority": "interactive", "X-UMA-SLO-TTFT-MS": "300" },
  ask: { "X-UMA-Priority": "interactive", "X-UMA-SLO-TTFT-MS": "1000" },
  refactor: { "X-UMA-Priority": "background" },
};

class Refused extends Error {}

/** Send `body` to `path` and yield the events of the answer; aborting `signal` ends the request at the daemon. */
async function* events({ url, key }, use, path, body, signal) {
  const headers = { "Content-Type": "application/json", "X-UMA-App": `vscode-${use}`, ...USES[use] };
  if (key) headers.Authorization = `Bearer ${key}`;
  const target = new URL(path, url.endsWith("/") ? url : `${url}/`);
  const answer = await fetch(target, {
    method: "POST", headers, signal, body: JSON.stringify({ ...body, stream: true }),
  });
  if (!answer.ok) throw new Refused(await reason(answer));
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of answer.body) {
    const lines = (rest + decoder.decode(bytes, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message);
      yield event;
    }
  }
}

async function reason(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}

/** Yield the parts of a chat's answer. */
async function* chat(daemon, use, messages, signal) {
  for await (const event of events(daemon, use, "v1/chat/completions", { messages }, signal)) {
    const part = event.choices?.[0]?.delta?.content;
    if (part) yield part;
  }
}

/** Return how `prompt` goes on, one line of at most `maxTokens`. */
async function complete(daemon, prompt, maxTokens, signal) {
  const body = { prompt, max_tokens: maxTokens, temperature: 0, stop: ["\n"] };
  let text = "";
  for await (const event of events(daemon, "completion", "v1/completions", body, signal)) {
    text += event.choices?.[0]?.text ?? "";
  }
  return text;
}

/** Return the code of an answer, without the fence and the words around it. */
function codeOf(answer) {
  const fenced = /```[^\n]*\n([\s\S]*?)\n?```/.exec(answer);
  return fenced ? fenced[1] : answer.trim();
}

module.exports = { USES, Refused, chat, complete, codeOf };
