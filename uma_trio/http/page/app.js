// The page of uma-trio: a chat, and what the daemon computes. No build step, no library.
// Whatever comes from a model, a program or a person becomes a text node; there is no markup from strings.

const BASE = location.pathname.replace(/(\/v1)?\/ui\/.*$/, "");
const $ = (id) => document.getElementById(id);

/** Make an element: properties, listeners ("on..."), attributes with "-" or of a name in ATTRS, children. */
const ATTRS = new Set(["role", "for", "colspan", "scope", "start"]);
function el(name, props = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key.includes("-") || ATTRS.has(key)) made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}
const count = (n) => Number(n).toLocaleString("en");
const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : ms < 1e5 ? `${(ms / 1000).toFixed(ms < 1e4 ? 2 : 1)} s` : `${Math.round(ms / 1000)} s`);
const bytes = (n) => (n < 1 << 20 ? `${Math.round(n / 1024)} KiB` : n < 1 << 30 ? `${(n / (1 << 20)).toFixed(1)} MiB` : `${(n / (1 << 30)).toFixed(2)} GiB`);

// --- the daemon ---

class Refused extends Error {}

const headers = (more) => {
  const key = sessionStorage.getItem("uma.key");
  return { "X-UMA-App": "uma-trio page", ...(key && { Authorization: `Bearer ${key}` }), ...more };
};

/** Ask the daemon; throws Refused with what it said, TypeError if nobody is there. */
async function ask(path, { body, signal, more } = {}) {
  const post = body !== undefined;
  const answer = await fetch(BASE + path, {
    method: post ? "POST" : "GET",
    headers: headers({ ...(post && { "Content-Type": "application/json" }), ...more }),
    body: post ? JSON.stringify(body) : undefined,
    signal, cache: "no-store",
  });
  if (answer.ok) return answer;
  if (answer.status === 401) wantKey();
  const said = await answer.json().catch(() => ({}));
  throw new Refused(said.error?.message ?? said.message ?? `HTTP ${answer.status}`);
}

/** The server-sent events of an answer: {data, id}. */
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      const blocks = held.split("\n\n");
      held = blocks.pop();
      for (const block of blocks) {
        const found = { data: "", id: "" };
        for (const line of block.split("\n")) {
          if (line.startsWith("data: ")) found.data += line.slice(6);
          else if (line.startsWith("id: ")) found.id = line.slice(4);
        }
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

let models = [];
let hello = null;
let isThere = true;

function there(yes, why) {
  if (!yes && isThere) $("notice").textContent = why ?? "The daemon does not answer. This page tries again every two seconds.";
  isThere = yes;
  $("notice").hidden = yes;
  $("state").className = `state ${yes ? "on" : "off"}`;
  $("state").textContent = yes ? "connected" : "no daemon";
}

/** The models that write, with what they are doing; the others make vectors or scores. */
async function learnModels() {
  const told = await (await ask("/v1/models")).json();
  const writes = new Map((told.models ?? []).map((one) => [one.name, one.capabilities ?? []]));
  models = (told.data ?? []).map((one) => ({
    ...one, state: one.status?.value ?? "loaded", failed: one.status?.failed,
    writes: (one.capabilities ?? writes.get(one.id) ?? (writes.size ? [] : ["completion"])).includes("completion"),
  }));
  if (!models.some((one) => one.writes)) for (const one of models) one.writes = true;
  there(true);
  showModels();
}

async function keepLearning() {
  for (;;) {
    let pause = 5000;
    if (!document.hidden) {
      try {
        if (isThere && models.length && !models.some((one) => one.state === "loading")) await ask("/health");
        else await learnModels();
        there(true);
      } catch (error) {
        if (!(error instanceof Refused)) there(false);
        pause = 2000;
      }
    }
    await new Promise((done) => { lookNow = done; setTimeout(done, pause); });
  }
}
let lookNow = () => {};

function wantKey() {
  const had = sessionStorage.getItem("uma.key");
  if (had) $("key-said").textContent = "The daemon does not know that key. Try another one.";
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

// --- Markdown, the part of it that models write, as elements ---

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|__(?=\S)([\s\S]*?\S)__(?!\w)|\*(?=[^\s*])([\s\S]*?[^\s*])\*|(?<!\w)_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)|~~(?=\S)([\s\S]*?\S)~~|!?\[([^\]\n]*)\]\((https?:\/\/[^\s()]+(?:\([^\s()]*\))?[^\s()]*)(?:\s+"[^"\n]*")?\)|<?(https?:\/\/[^\s<>"')\]]+[^\s<>"')\].,;:!?])>?|\\([\\`*_{}[\]()#+\-.!|~>])/;

// Looking for the end of a mark takes time by the square of what is looked through: so much at once.
const PIECE = 3000;

function inline(text, depth = 0) {
  if (text.length > PIECE) return [...inline(text.slice(0, PIECE), depth), ...inline(text.slice(PIECE), depth)];
  const out = [];
  while (text) {
    const found = depth < 6 ? INLINE.exec(text) : null;
    if (!found) { out.push(text); break; }
    if (found.index) out.push(text.slice(0, found.index));
    const [all, , code, bold, bold2, it, it2, gone, label, href, url, escaped] = found;
    const inner = (name, body) => el(name, {}, inline(body, depth + 1));
    const link = (to, body) => el("a", { href: to, target: "_blank", rel: "noopener noreferrer" }, body);
    if (code !== undefined) out.push(el("code", { textContent: code.trim() || code }));
    else if (bold ?? bold2) out.push(inner("strong", bold ?? bold2));
    else if (it ?? it2) out.push(inner("em", it ?? it2));
    else if (gone) out.push(inner("s", gone));
    else if (href) out.push(link(href, label || href));
    else if (url) out.push(link(url, url));
    else if (escaped) out.push(escaped);
    else out.push(all);
    text = text.slice(found.index + all.length);
  }
  return out;
}

/** Cut a text into blocks, each a text: fences whole, lists and tables whole, paragraphs at empty lines. */
function blocksOf(text) {
  const blocks = [];
  let now = [], fence = "";
  const end = () => { if (now.length) blocks.push(now.join("\n")); now = []; };
  for (const line of text.split("\n")) {
    const mark = /^ {0,3}(`{3,}|~{3,})/.exec(line)?.[1];
    if (fence) {
      now.push(line);
      if (mark && mark[0] === fence[0] && mark.length >= fence.length && !line.trim().slice(mark.length)) { fence = ""; end(); }
    } else if (mark) { end(); fence = mark; now.push(line); }
    else if (!line.trim()) {
      if (now.length && ITEM.test(now[0])) now.push(line); else end();
    } else {
      const list = now.length && ITEM.test(now[0]);
      if (list && !now.at(-1).trim() && !ITEM.test(line) && !/^\s/.test(line)) end();
      else if (!list && ITEM.test(line) && now.length && !/^ *\d/.test(line)) end();
      else if (/^#{1,6} /.test(line)) end();
      now.push(line);
      if (/^#{1,6} /.test(line) || /^ {0,3}([-*_])( *\1){2,} *$/.test(line)) end();
    }
  }
  end();
  return blocks;
}
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;

function codeBlock(name, body) {
  const copy = el("button", { type: "button", className: "quiet", textContent: "Copy", onclick: () => copyText(body, copy) });
  return el("div", { className: "code" },
    el("div", { className: "code-head" }, el("span", { textContent: name || "text" }), copy),
    el("pre", { tabIndex: 0 }, el("code", { textContent: body })));
}

function listOf(lines, depth = 0) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const made = /\d/.test(mark) ? el("ol", { start: String(parseInt(mark, 10)) }) : el("ul");
  for (let i = 0; i < lines.length;) {
    const first = ITEM.exec(lines[i]);
    const text = [lines[i].slice(first?.[0].length ?? 0)], inner = [];
    for (i++; i < lines.length; i++) {
      const next = ITEM.exec(lines[i]);
      if (next && next[1].length <= indent.length) break;
      if (next || inner.length) inner.push(lines[i]);
      else if (lines[i].trim()) text.push(lines[i].trim());
    }
    const nested = inner.filter((line) => line.trim());
    made.append(el("li", {}, inline(text.join("\n")), nested.length && depth < 8 ? listOf(nested, depth + 1) : nested.join("\n")));
  }
  return made;
}

function tableOf(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => inline(cell.trim()));
  const [head, , ...rows] = lines;
  return el("div", { className: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, cells(head).map((cell) => el("th", { scope: "col" }, cell)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, cells(row).map((cell) => el("td", {}, cell)))))));
}

function block(text, depth = 0) {
  const lines = text.split("\n");
  const fence = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/.exec(text);
  if (fence) {
    const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence[1]);
    return codeBlock(fence[2], lines.slice(1, closed ? -1 : undefined).join("\n"));
  }
  const heading = /^(#{1,6}) +(.*?)#* *$/.exec(text);
  if (heading) return el(`h${heading[1].length}`, {}, inline(heading[2]));
  if (/^ {0,3}([-*_])( *\1){2,} *$/.test(text)) return el("hr");
  if (ITEM.test(text)) return listOf(lines.filter((line) => line.trim()));
  if (lines.every((line) => /^ {0,3}>/.test(line)) && depth < 4)
    return el("blockquote", {}, blocksOf(lines.map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n")).map((one) => block(one, depth + 1)));
  if (lines.length > 1 && lines[0].includes("|") && /^[\s|:-]+$/.test(lines[1]) && lines[1].includes("-")) return tableOf(lines);
  return el("p", {}, lines.flatMap((line, i) => (i ? [el("br"), inline(line)] : [inline(line)])).flat());
}

/** Show a text that grows: blocks that are as before stay. */
function markdown(node, text) {
  const blocks = blocksOf(text);
  blocks.forEach((source, i) => {
    const old = node.children[i];
    if (old?.source === source) return;
    const made = block(source);
    made.source = source;
    if (old) old.replaceWith(made); else node.append(made);
  });
  while (node.children.length > blocks.length) node.lastElementChild.remove();
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// --- conversations ---

const FIELDS = ["system", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "priority", "reasoning_effort"];
let talks = [], talk = null; // a conversation with a `run` is being answered
const LIVE = new Set(["node", "wait", "run"]);
const kept = (key, value) => (LIVE.has(key) ? undefined : value);

function load() {
  try { talks = JSON.parse(localStorage.getItem("uma.talks") ?? "[]"); } catch { talks = []; }
  talks = talks.filter((one) => Array.isArray(one?.turns));
  talk = talks.find((one) => one.id === localStorage.getItem("uma.talk")) ?? talks[0] ?? fresh();
}
function fresh() {
  const said = talk?.said ?? {};
  return { id: crypto.randomUUID?.() ?? String(Math.random()), title: "", model: talk?.model ?? "", said: { ...said }, turns: [] };
}
let saving = 0;
function save() {
  clearTimeout(saving);
  saving = setTimeout(saveNow, 300);
}
function saveNow() {
  clearTimeout(saving);
  try {
    localStorage.setItem("uma.talks", JSON.stringify(talks, kept));
    localStorage.setItem("uma.talk", talk.id);
  } catch {
    $("notice").textContent = "The browser has no room for more conversations; delete some. This one is kept until the tab is closed.";
    $("notice").hidden = false;
  }
}

function showTalks() {
  $("talks").replaceChildren(...talks.map((one) => el("li", { className: `${one === talk ? "now" : ""} ${one.run ? "runs" : ""}` },
    el("button", { type: "button", className: "open", textContent: one.title || "New conversation", title: one.title, "aria-current": one === talk ? "true" : undefined, onclick: () => go(one) }),
    el("button", { type: "button", className: "drop", textContent: "✕", "aria-label": `Delete ${one.title || "this conversation"}`, onclick: () => drop(one) }))));
}
function go(one) {
  talk = one;
  closeSide();
  showTalk();
  save();
}
function drop(one) {
  if (one.turns.length && !confirm("Delete this conversation?")) return;
  const was = one === talk;
  one.run?.abort.abort();
  talks = talks.filter((other) => other !== one);
  if (was) talk = talks[0] ?? fresh();
  showTalk();
  saveNow();
}
function showTalk() {
  showTalks();
  for (const name of FIELDS) $(name).value = talk.said[name] ?? "";
  showModels();
  $("log").replaceChildren(...(talk.turns.length ? talk.turns.map((turn) => (turn.node = turnNode(turn))) : [welcome()]));
  $("log").scrollTop = $("log").scrollHeight;
  showBusy();
}
const TRIES = ["Tell me a story about a fox and a lantern", "Explain continuous batching in three sentences", "Write a haiku about waiting"];
function welcome() {
  return el("div", { className: "welcome" }, el("h2", { textContent: "What would you like to know?" }),
    el("p", { textContent: "Answers come from the model on this machine. Nothing leaves it." }),
    el("div", { className: "tries" }, TRIES.map((text) => el("button", { type: "button", textContent: text, onclick: () => { $("say").value = text; submit(); } }))));
}

function turnNode(turn) {
  const mine = turn.role === "user";
  const node = el("article", { className: `turn ${mine ? "user" : "model"}`, "aria-label": mine ? "You" : "Answer" },
    el("div", { className: "who", textContent: mine ? "You" : turn.model || "Model" }));
  if (mine) node.append(el("div", { className: "body", textContent: turn.content }));
  else node.append(el("div", { className: "parts" }));
  node.append(el("div", { className: "foot" }));
  turn.node = node;
  if (mine) footOf(turn); else showAnswer(turn);
  return node;
}

function showAnswer(turn) {
  const parts = turn.node.querySelector(".parts");
  const live = talk.run?.turn === turn;
  const part = (name, make) => parts.querySelector(`:scope > .${name}`) ?? parts.appendChild(make());
  const gone = (name) => parts.querySelector(`:scope > .${name}`)?.remove();
  if (turn.reasoning) {
    const thought = part("thought", () => el("details", { className: "thought" }, el("summary"), el("div", { className: "text" })));
    thought.firstChild.textContent = live && !turn.content ? "Reasoning…" : `Reasoning, ${count(turn.reasoning.split(/\s+/).length)} words`;
    if (thought.lastChild.textContent !== turn.reasoning) thought.lastChild.textContent = turn.reasoning;
  } else gone("thought");
  if (turn.content) markdown(part("md", () => el("div", { className: "md" })), turn.content);
  else gone("md");
  (turn.calls ?? []).forEach((call, i) => {
    const shown = part(`call-${i}`, () => el("details", { className: `call call-${i}`, open: true }, el("summary"), el("pre", { tabIndex: 0 })));
    shown.firstChild.textContent = `Calls ${call.name}`;
    shown.lastChild.textContent = call.arguments;
  });
  if (live && turn.wait) {
    const wait = part("wait", () => el("div", { className: "wait" }, el("span")));
    wait.firstChild.textContent = turn.wait.text;
    wait.querySelector("progress")?.remove();
    if (turn.wait.of) wait.append(el("progress", { max: turn.wait.of, value: turn.wait.at, "aria-label": "Prompt" }));
    parts.append(wait);
  } else gone("wait");
  if (turn.error) part("error", () => el("div", { className: "error", role: "alert" })).textContent = turn.error;
  else gone("error");
  for (const one of [parts, ...parts.querySelectorAll(".caret")]) one.classList.remove("caret");
  if (live && !turn.wait) (parts.querySelector(":scope > .md")?.lastElementChild ?? parts).classList.add("caret");
  if (!live) footOf(turn);
}

function footOf(turn) {
  const act = (name, run, what) => el("button", { type: "button", className: "quiet", textContent: name, "aria-label": what, onclick: (event) => run(event.target) });
  const last = turn === talk.turns.at(-1);
  const foot = [];
  if (turn.stats) foot.push(el("span", { className: "stats", textContent: statsText(turn.stats) }));
  if (turn.content) foot.push(act("Copy", (button) => copyText(turn.content, button)));
  if (turn.role === "user") foot.push(act("Edit", () => edit(turn), "Edit this message"));
  else {
    foot.push(act("Retry", () => retry(turn), "Answer again"));
    if (last && turn.content && (turn.cut || turn.error)) foot.push(act("Continue", () => answer(turn), "Go on with this answer"));
  }
  turn.node.querySelector(".foot").replaceChildren(...foot.filter((one) => one.tagName === "SPAN"), el("div", { className: "acts" }, foot.filter((one) => one.tagName !== "SPAN")));
}

function statsText(stats) {
  const parts = [];
  if (stats.ttft !== undefined) parts.push(`first token ${seconds(stats.ttft)}`);
  if (stats.rate) parts.push(`${stats.rate.toFixed(stats.rate < 100 ? 1 : 0)} tokens/s`);
  if (stats.tokens) parts.push(`${count(stats.tokens)} token${stats.tokens === 1 ? "" : "s"}`);
  if (stats.prompt) parts.push(`${Math.round((100 * stats.cached) / stats.prompt)} % of ${count(stats.prompt)} prompt tokens cached`);
  if (stats.queue > 100) parts.push(`${seconds(stats.queue)} in the queue`);
  if (stats.reason === "length") parts.push("cut at its limit");
  if (stats.reason === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

function edit(turn) {
  const body = turn.node.querySelector(".body");
  const text = el("textarea", { value: turn.content, "aria-label": "The message" });
  const done = () => { turn.node.replaceWith(turnNode(turn)); };
  const send = () => {
    if (!text.value.trim()) return;
    talk.run?.abort.abort();
    talk.turns.length = talk.turns.indexOf(turn);
    say(text.value.trim());
  };
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); done(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  body.replaceWith(text);
  turn.node.querySelector(".foot").replaceChildren(el("div", { className: "editing" },
    el("button", { type: "button", className: "prime", textContent: "Send", onclick: send }),
    el("button", { type: "button", textContent: "Cancel", onclick: done })));
  text.focus();
}

function retry(turn) {
  talk.run?.abort.abort();
  talk.turns.length = talk.turns.indexOf(turn);
  answer();
}

function submit() {
  const text = $("say").value.trim();
  if (!text || talk.run) return;
  $("say").value = "";
  grow();
  say(text);
}
function say(text) {
  if (!talks.includes(talk)) talks.unshift(talk);
  talk.title ||= text.replace(/\s+/g, " ").slice(0, 80);
  talk.turns.push({ role: "user", content: text });
  answer();
}

function bodyOf(turns, goesOn) {
  const { system, ...said } = talk.said;
  const body = { model: talk.model || models.find((one) => one.writes)?.id || "default", messages: [], stream: true, return_progress: true, stream_options: { include_usage: true } };
  if (system) body.messages.push({ role: "system", content: system });
  for (const turn of turns) if (turn.content || turn.role === "user") body.messages.push({ role: turn.role, content: turn.content });
  if (goesOn) body.continue_final_message = true;
  body.temperature = 0.7;
  for (const [name, value] of Object.entries(said)) if (value !== "") body[name] = ["priority", "reasoning_effort"].includes(name) ? value : Number(value);
  return body;
}

/** Answer the last message, or go on with `turn`. */
async function answer(turn) {
  talk.run?.abort.abort();
  const mine = talk, goesOn = turn !== undefined;
  if (!goesOn) {
    turn = { role: "assistant", content: "", reasoning: "", calls: [] };
    mine.turns.push(turn);
  }
  const body = bodyOf(goesOn ? mine.turns : mine.turns.slice(0, -1), goesOn);
  const run = mine.run = { abort: new AbortController(), turn, at: performance.now() };
  Object.assign(turn, { error: "", cut: false, stats: undefined, model: body.model, wait: { text: "Waiting for a slot…" } });
  stays = true;
  showTalk();
  save();
  try {
    await follow(await ask("/v1/chat/completions", { body, signal: run.abort.signal }), run);
    there(true);
  } catch (error) {
    turn.cut = true;
    if (error.name === "AbortError") turn.stats = { ...turn.stats, reason: "stopped" };
    else if (error instanceof Refused) turn.error = error.message;
    else { turn.error = "The daemon has gone away."; there(false); }
    lookNow();
  }
  turn.wait = null;
  if (mine.run === run) mine.run = undefined;
  if (mine === talk && turn.node?.isConnected) {
    showAnswer(turn);
    for (const one of talk.turns) if (one.node?.querySelector(".foot .editing") === null) footOf(one);
    showBusy();
    toEnd();
    $("heard").textContent = turn.error ? "The answer failed." : turn.stats?.reason === "stopped" ? "Stopped." : "The answer is complete.";
  }
  showTalks();
  save();
}

async function follow(answered, run) {
  const { turn } = run;
  let frame = 0, ended = false;
  const draw = () => { frame ||= requestAnimationFrame(() => { frame = 0; if (turn.node.isConnected) { showAnswer(turn); toEnd(); } }); };
  turn.stats = {};
  for await (const { data } of eventsOf(answered)) {
    if (data === "[DONE]") { ended = true; break; }
    const told = JSON.parse(data);
    if (told.error) throw new Refused(told.error.message ?? "the answer failed");
    const choice = told.choices?.[0], delta = choice?.delta ?? {};
    if (told.prompt_progress) {
      const { total, processed, cache } = told.prompt_progress;
      turn.wait = { text: `Reading the prompt: ${count(processed)} of ${count(total)} tokens${cache ? `, ${count(cache)} were cached` : ""}`, of: total, at: processed };
    }
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (delta.content || thought || delta.tool_calls) { turn.wait = null; turn.stats.ttft ??= performance.now() - run.at; }
    if (delta.content) turn.content += delta.content;
    if (thought) turn.reasoning += thought;
    for (const call of delta.tool_calls ?? []) {
      const known = ((turn.calls ??= [])[call.index ?? 0] ??= { name: "", arguments: "" });
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
    if (choice?.finish_reason) { turn.stats.reason = choice.finish_reason; turn.cut = choice.finish_reason === "length"; }
    if (told.timings) {
      const { cache_n, prompt_n, predicted_n, predicted_per_second, queue_ms } = told.timings;
      Object.assign(turn.stats, { cached: cache_n, prompt: cache_n + prompt_n, tokens: predicted_n, rate: predicted_per_second, queue: queue_ms });
    }
    draw();
  }
  cancelAnimationFrame(frame);
  if (!ended) throw new TypeError("cut");
}

/** Stay at the end of the conversation, unless the reader has scrolled up. */
let stays = true;
function toEnd() { if (stays) $("log").scrollTop = $("log").scrollHeight; }

function showBusy() {
  const yes = Boolean(talk.run);
  $("send").hidden = yes;
  $("stop").hidden = !yes;
  $("log").setAttribute("aria-busy", String(yes));
  if (yes) $("heard").textContent = "Answering.";
}

function showModels() {
  const writing = models.filter((one) => one.writes);
  const chosen = writing.some((one) => one.id === talk.model) ? talk.model : writing[0]?.id ?? "";
  const now = writing.map((one) => `${one.id} ${one.state}`).join("\n") + chosen;
  if (now !== showModels.was) {
    showModels.was = now;
    $("model").replaceChildren(...writing.map((one) => el("option", { value: one.id, textContent: one.state === "loaded" ? one.id : `${one.id} (${one.state})`, selected: one.id === chosen })));
  }
  const model = writing.find((one) => one.id === chosen);
  const room = model?.meta?.n_ctx;
  $("model-state").textContent = !model ? "" : model.state === "loaded" ? (room ? `${count(room)} tokens of context` : "") : model.state === "loading" ? "is being loaded" : model.state === "failed" ? "could not be loaded" : "is loaded with the first message";
}

function grow() {
  const box = $("say");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight * 0.4)}px`;
}
function closeSide() { $("side").classList.remove("open"); $("menu").setAttribute("aria-expanded", "false"); }

function exportAll() {
  const link = el("a", { href: URL.createObjectURL(new Blob([JSON.stringify(talks.map((one) => JSON.parse(JSON.stringify(one, kept))), null, 1)], { type: "application/json" })), download: "conversations.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// --- views, keys, start ---

function route() {
  const batch = location.hash === "#batch";
  $("chat").hidden = batch;
  $("batch").hidden = !batch;
  for (const [id, on] of [["to-chat", !batch], ["to-batch", batch]])
    if (on) $(id).setAttribute("aria-current", "page"); else $(id).removeAttribute("aria-current");
  document.title = batch ? "Batch · uma-trio" : "uma-trio";
}

let before = "";
const KEYS = {
  "gc": () => { location.hash = "#chat"; }, "gb": () => { location.hash = "#batch"; },
  "/": () => { location.hash = "#chat"; $("say").focus(); }, "n": () => { location.hash = "#chat"; $("new-chat").click(); $("say").focus(); },
  "?": () => $("show-keys").click(), "p": () => { if (!$("batch").hidden) $("pause").click(); },
};
function onKey(event) {
  if (event.key === "Escape" && talk.run && !document.querySelector("dialog[open]")) { talk.run.abort.abort(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]") || event.target.closest("input, textarea, select")) return;
  const key = event.key.toLowerCase();
  const act = KEYS[before + key] ?? KEYS[key];
  before = key === "g" ? "g" : "";
  if (act) { event.preventDefault(); act(); }
}

function start() {
  load();
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  $("say").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  });
  $("say").addEventListener("input", grow);
  $("stop").addEventListener("click", () => talk.run?.abort.abort());
  $("new-chat").addEventListener("click", () => { talk = fresh(); go(talk); });
  $("export").addEventListener("click", exportAll);
  $("forget").addEventListener("click", () => {
    if (!confirm("Delete all conversations in this browser?")) return;
    for (const one of talks) one.run?.abort.abort();
    talks = [];
    go(fresh());
    saveNow();
  });
  $("show-settings").addEventListener("click", () => {
    const open = ($("settings").hidden = !$("settings").hidden);
    $("show-settings").setAttribute("aria-expanded", String(!open));
  });
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  for (const name of FIELDS) $(name).addEventListener("change", () => { if ($(name).reportValidity()) { talk.said[name] = $(name).value; save(); } });
  $("model").addEventListener("change", () => { talk.model = $("model").value; showModels(); save(); });
  $("menu").addEventListener("click", () => $("menu").setAttribute("aria-expanded", String($("side").classList.toggle("open"))));
  $("log").addEventListener("scroll", () => { stays = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 40; });
  $("log").addEventListener("click", closeSide);
  $("key-form").addEventListener("submit", () => { sessionStorage.setItem("uma.key", $("key").value.trim()); $("key").value = ""; learnModels().catch(() => {}); });
  $("forget-key").addEventListener("click", () => { sessionStorage.removeItem("uma.key"); location.reload(); });
  $("show-keys").addEventListener("click", () => { $("forget-key").hidden = !sessionStorage.getItem("uma.key"); $("keys").showModal(); });
  for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
  addEventListener("hashchange", route);
  addEventListener("keydown", onKey);
  addEventListener("pagehide", saveNow);
  document.addEventListener("visibilitychange", () => lookNow());
  route();
  showTalk();
  keepLearning();
}

start();
