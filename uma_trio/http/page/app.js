// The page of uma-trio: a chat, and what the daemon computes.
// Whatever comes from a model, a program or a person becomes a text node; there is no markup from strings.

const BASE = location.pathname.replace(/(\/v1)?\/ui\/.*$/, "");
const $ = (id) => document.getElementById(id);

const on = (id, event, act) => (typeof id === "string" ? $(id) : id).addEventListener(event, act);

/** Make an element: "name.class", properties, listeners ("on..."), attributes (with a "-", or in ATTRS), children. */
const ATTRS = new Set(["role", "for", "scope", "start"]);
function el(what, props, ...children) {
	if (props instanceof Node || typeof props !== "object" || Array.isArray(props)) return el(what, {}, props ?? "", ...children);
	const [name, ...classes] = what.split("."), made = document.createElement(name);
	made.classList.add(...classes.filter(Boolean));
	for (const [key, value] of Object.entries(props)) {
		if (value === undefined) continue;
		if (key.startsWith("on")) on(made, key.slice(2), value);
		else if (key.includes("-") || ATTRS.has(key)) made.setAttribute(key, value);
		else made[key] = value;
	}
	for (const child of children.flat()) if (child ?? false) made.append(child); // too many for arguments of one call
	return made;
}
const button = (text, onclick, props = {}, kind = "quiet") => el(`button.${kind}`, { type: "button", ...props, onclick }, text);
const count = (n) => Number(n).toLocaleString("en");
const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
const seconds = (ms) => (ms < 1000 ? `${ms.toFixed(ms < 10 ? 1 : 0)} ms` : ms < 1e5 ? `${(ms / 1000).toFixed(ms < 1e4 ? 2 : 1)} s` : `${Math.round(ms / 1000)} s`);
const bytes = (n) => (n < 1 << 30 ? `${(n / (1 << 20)).toFixed(1)} MiB` : `${(n / (1 << 30)).toFixed(2)} GiB`);

// --- the daemon ---

class Refused extends Error {}

/** Ask the daemon; throws Refused with what it said, TypeError if nobody is there. */
async function ask(path, { body, signal, more } = {}) {
	const key = sessionStorage.getItem("uma.key");
	const headers = { "X-UMA-App": "uma-trio page", ...(key && { Authorization: `Bearer ${key}` }), ...(body && { "Content-Type": "application/json" }), ...more };
	const answer = await fetch(BASE + path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
	if (answer.ok) return answer;
	if (answer.status === 401) wantKey();
	const said = await answer.json().catch(() => null);
	if (!said && answer.status >= 500) throw new TypeError("a proxy answers for a daemon that does not");
	throw new Refused(said?.error?.message ?? said?.message ?? `HTTP ${answer.status}`);
}

/** The server-sent events of an answer: {data, id}. */
async function* eventsOf(answer) {
	const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
	let rest = "";
	try {
		for (;;) {
			const { value, done } = await reader.read();
			if (done) return;
			const blocks = (rest + value).split("\n\n");
			rest = blocks.pop();
			for (const block of blocks) {
				const [, data] = /^data: (.*)$/m.exec(block) ?? [];
				if (data) yield { data, id: /^id: (.*)$/m.exec(block)?.[1] };
			}
		}
	} finally {
		reader.cancel().catch(() => {});
	}
}

let models = [], hello = null, isThere = true;

function tell(text) { $("notice").textContent = text; $("notice").hidden = !text; }
function there(yes) {
	if (!yes || !isThere) tell(yes ? "" : "The daemon does not answer. This page tries again every two seconds.");
	isThere = yes;
	$("state").className = `state ${yes ? "on" : "off"}`;
	$("state").textContent = yes ? "connected" : "no daemon";
}

/** The models that write, with what they are doing; the others make vectors or scores. */
async function learnModels() {
	const told = await (await ask("/v1/models")).json();
	models = (told.data ?? []).map((one) => ({
		...one, state: one.status?.value ?? "loaded",
		writes: (one.capabilities ?? ["completion"]).includes("completion"),
	}));
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
				there(error instanceof Refused);
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

const INLINE = /(?<!`)(`+)(?!`)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=[^\s*])([\s\S]*?[^\s*])\*|~~(?=\S)([\s\S]*?\S)~~|!?\[([^\]\n]*)\]\((https?:\/\/[^\s()]+(?:\([^\s()]*\))?[^\s()]*)(?:\s+"[^"\n]*")?\)|<?(https?:\/\/[^\s<>"')\]]+[^\s<>"')\].,;:!?])>?|\\([\\`*_{}[\]()#+\-.!|~>])/;

// Looking for the end of a mark takes time by the square of what is looked through: so much at once.
const PIECE = 3000;

function inline(text, depth = 0) {
	const out = [];
	for (let at = 0; at < text.length; at += PIECE) out.push(...marksOf(text.slice(at, at + PIECE), depth));
	return out;
}
function marksOf(text, depth) {
	const out = [];
	while (text) {
		const found = depth < 6 ? INLINE.exec(text) : null;
		if (!found) { out.push(text); break; }
		out.push(text.slice(0, found.index));
		const [all, , code, bold, it, gone, label, href, url, escaped] = found;
		const inner = (name, body) => el(name, {}, inline(body, depth + 1));
		const link = (to, body) => el("a", { href: to, target: "_blank", rel: "noopener noreferrer" }, body);
		if (code !== undefined) out.push(el("code", code.trim() || code));
		else if (bold) out.push(inner("strong", bold));
		else if (it) out.push(inner("em", it));
		else if (gone) out.push(inner("s", gone));
		else if (href) out.push(link(href, label || href));
		else if (url) out.push(link(url, url));
		else if (escaped) out.push(escaped);
		else out.push(all);
		text = text.slice(found.index + all.length);
	}
	return out;
}

/** Cut a text into blocks: fences, lists and tables whole, paragraphs at empty lines. Each line is looked at once. */
function blocksOf(text) {
	const blocks = [];
	let now = [], fence = "", list = false;
	const end = () => { if (now.length) blocks.push(now.join("\n")); now = []; list = false; };
	for (const line of text.split("\n")) {
		const mark = /^ {0,3}(`{3,}|~{3,})/.exec(line)?.[1];
		if (fence) {
			now.push(line);
			if (mark && mark[0] === fence[0] && mark.length >= fence.length && !line.trim().slice(mark.length)) { fence = ""; end(); }
		} else if (mark) { end(); fence = mark; now.push(line); }
		else if (!line.trim()) {
			if (list) now.push(""); else end();
		} else {
			const item = ITEM.test(line), heading = /^#{1,6} /.test(line);
			if (heading || (list ? !now.at(-1) && !item && !/^\s/.test(line) : item && !/^ *\d/.test(line))) end();
			if (!now.length) list = item;
			now.push(line);
			if (heading || isRule(line)) end();
		}
	}
	end();
	return blocks;
}
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const isRule = (line) => /^ {0,3}([-*_])( *\1){2,} *$/.test(line);

/** A heading without the marks that may end it; those of "C#" stay. */
function withoutMarks(text) {
	let end = text.length;
	while (text[end - 1] === "#") end--;
	return end && text[end - 1] !== " " ? text : text.slice(0, end).trimEnd();
}

function codeBlock(name, body) {
	const copy = button("Copy", () => copyText(body, copy));
	return el("div.code", {},
		el("div.code-head", el("span", name || "text"), copy),
		el("pre", { tabIndex: 0 }, el("code", body)));
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
		made.append(el("li", inline(text.join("\n")), nested.length && depth < 8 ? listOf(nested, depth + 1) : nested.join("\n")));
	}
	return made;
}

function tableOf(lines) {
	const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => inline(cell.trim()));
	const [head, , ...rows] = lines;
	return el("div.scroll", el("table", {},
		el("thead", el("tr", cells(head).map((cell) => el("th", { scope: "col" }, cell)))),
		el("tbody", rows.map((row) => el("tr", cells(row).map((cell) => el("td", cell)))))));
}

function block(text, depth = 0) {
	const lines = text.split("\n");
	const fence = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)/.exec(text);
	if (fence) {
		const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence[1]);
		return codeBlock(fence[2], lines.slice(1, closed ? -1 : undefined).join("\n"));
	}
	const heading = /^#{1,6}(?= )/.exec(text)?.[0];
	if (heading) return el(`h${heading.length}`, inline(withoutMarks(text.slice(heading.length).trim())));
	if (isRule(text)) return el("hr");
	if (ITEM.test(text)) return listOf(lines.filter((line) => line.trim()));
	if (lines.every((line) => /^ {0,3}>/.test(line)) && depth < 4)
		return el("blockquote", blocksOf(lines.map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n")).map((one) => block(one, depth + 1)));
	if (lines.length > 1 && lines[0].includes("|") && /^[\s|:-]+$/.test(lines[1]) && lines[1].includes("-")) return tableOf(lines);
	return el("p", lines.flatMap((line, i) => (i ? [el("br"), inline(line)] : [inline(line)])).flat());
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

// Each conversation is stored by itself. A tab writes only what has changed in it, and takes up what others write.
const STORED = "uma.talk.", unsaved = new Set();
const newId = () => crypto.randomUUID?.() ?? String(Math.random());

function load() {
	let last;
	try {
		// As long as all conversations were one item, a tab that was closed erased what others had written.
		const before = JSON.parse(localStorage.getItem("uma.talks") ?? "[]").filter((one) => Array.isArray(one?.turns));
		talks = before.map((one, i) => ({ at: before.length - i, ...one }));
		talks.forEach(save);
		localStorage.removeItem("uma.talks");
		catchUp();
		last = sessionStorage.getItem("uma.talk") ?? localStorage.getItem("uma.talk");
	} catch { /* the browser stores nothing for this page */ }
	talk = talks.find((one) => one.id === last) ?? talks[0] ?? fresh();
}
function fresh() {
	const said = talk?.said ?? {};
	return { id: newId(), title: "", model: talk?.model ?? "", said: { ...said }, turns: [] };
}
function stored(id) {
	try {
		const found = JSON.parse(localStorage.getItem(STORED + id));
		return Array.isArray(found?.turns) ? { ...found, id, said: { ...found.said } } : null;
	} catch { return null; }
}
/** Take up what all tabs have stored, also while this one was asleep. */
function catchUp() {
	const ids = new Set(Object.keys(localStorage).filter((key) => key.startsWith(STORED)).map((key) => key.slice(STORED.length)));
	for (const one of talks) if (!ids.has(one.id) && !unsaved.has(one)) remove(one);
	ids.forEach(adopt);
}
/** Take up what another tab has stored of a conversation. Changed here as well, the one here becomes another. */
function adopt(id) {
	const theirs = stored(id);
	if (!theirs) return;
	const mine = talks.find((one) => one.id === id);
	if (mine && (mine.run || unsaved.has(mine) || (mine === talk && $("log").querySelector(".editing")))) {
		if (JSON.stringify(mine, kept) === JSON.stringify(theirs)) return;
		mine.id = newId();
		save(mine);
	} else if (mine) {
		Object.assign(mine, theirs);
		if (mine === talk) showTalk();
		return;
	}
	talks.push(theirs);
	talks.sort((a, b) => (b.at ?? 0) - (a.at ?? 0));
}
function remove(one) {
	one.run?.abort.abort();
	talks = talks.filter((other) => other !== one);
	if (one === talk) { talk = talks[0] ?? fresh(); showTalk(); }
}
function onStored({ key, newValue }) {
	if (key !== null && !key.startsWith(STORED)) return;
	const id = key?.slice(STORED.length), gone = newValue === null && talks.find((one) => one.id === id);
	if (key === null) catchUp();
	else if (gone) remove(gone);
	else adopt(id);
	showTalks();
}
let saving = 0;
function save(one) { if (one) unsaved.add(one); clearTimeout(saving); saving = setTimeout(saveNow, 300); }
function saveNow() {
	clearTimeout(saving);
	for (const one of talks) if (one.run) unsaved.add(one);
	try {
		for (const one of unsaved) {
			if (talks.includes(one)) localStorage.setItem(STORED + one.id, JSON.stringify(one, kept));
			unsaved.delete(one);
		}
		for (const where of [localStorage, sessionStorage]) where.setItem("uma.talk", talk.id);
	} catch {
		tell("The browser has no room for more conversations; delete some.");
	}
}

function showTalks() {
	$("talks").replaceChildren(...talks.map((one) => el("li", { className: `${one === talk ? "now" : ""} ${one.run ? "runs" : ""}` },
		button(one.title || "New conversation", () => go(one), { title: one.title, "aria-current": one === talk ? "true" : undefined }, "open"),
		button("✕", () => drop(one), { "aria-label": `Delete ${one.title || "this conversation"}` }, "drop"))));
}
function go(one) {
	talk = one;
	closeSide();
	showTalk();
	save();
}
function drop(one) {
	if (one.turns.length && !confirm("Delete this conversation?")) return;
	remove(one);
	forgetStored((key) => key === STORED + one.id);
}
function forgetStored(isGone) {
	try { for (const key of Object.keys(localStorage)) if (isGone(key)) localStorage.removeItem(key); } catch { /* nothing is stored */ }
	showTalks();
	save();
}
function showTalk() {
	showTalks();
	for (const name of FIELDS) $(name).value = talk.said[name] ?? "";
	showModels();
	$("log").replaceChildren(...(talk.turns.length ? talk.turns.map((turn) => (turn.node = turnNode(turn))) : [welcome()]));
	$("log").scrollTop = $("log").scrollHeight;
	showBusy();
}
const TRIES = ["Tell me a story about a fox and a lantern", "Write a haiku about waiting"];
function welcome() {
	return el("div.welcome", el("h2", "What would you like to know?"),
		el("p", "Answers come from the model on this machine. Nothing leaves it."),
		el("div.tries", TRIES.map((text) => button(text, () => { $("say").value = text; submit(); }, {}, ""))));
}

function turnNode(turn) {
	const mine = turn.role === "user";
	const node = el("article", { className: `turn ${mine ? "user" : "model"}`, "aria-label": mine ? "You" : "Answer" },
		el("div.who", mine ? "You" : turn.model || "Model"));
	if (mine) node.append(el("div.body", turn.content));
	else node.append(el("div.parts"));
	node.append(el("div.foot"));
	turn.node = node;
	if (mine) footOf(turn); else showAnswer(turn);
	return node;
}

function showAnswer(turn) {
	const parts = turn.node.querySelector(".parts");
	const live = talk.run?.turn === turn;
	const part = (name, make) => parts.querySelector(`:scope > .${name}`) ?? parts.appendChild(make());
	const gone = (name) => part(name, () => el("i")).remove();
	if (turn.reasoning) {
		const thought = part("thought", () => el("details.thought", el("summary"), el("div.text")));
		thought.firstChild.textContent = live && !turn.content ? "Reasoning…" : `Reasoning, ${count(turn.reasoning.split(/\s+/).length)} words`;
		if (thought.lastChild.textContent !== turn.reasoning) thought.lastChild.textContent = turn.reasoning;
	} else gone("thought");
	if (turn.content) markdown(part("md", () => el("div.md")), turn.content);
	else gone("md");
	(turn.calls ?? []).forEach((call, i) => {
		const shown = part(`call-${i}`, () => el("details", { className: `call call-${i}`, open: true }, el("summary"), el("pre", { tabIndex: 0 })));
		shown.firstChild.textContent = `Calls ${call.name}`;
		shown.lastChild.textContent = call.arguments;
	});
	if (live && turn.wait) {
		const wait = part("wait", () => el("div.wait", el("span")));
		wait.firstChild.textContent = turn.wait.text;
		wait.querySelector("progress")?.remove();
		if (turn.wait.of) wait.append(el("progress", { max: turn.wait.of, value: turn.wait.at, "aria-label": "Prompt" }));
		parts.append(wait);
	} else gone("wait");
	if (turn.error) part("error", () => el("div.error", { role: "alert" })).textContent = turn.error;
	else gone("error");
	for (const one of [parts, ...parts.querySelectorAll(".caret")]) one.classList.remove("caret");
	if (live && !turn.wait) (parts.querySelector(":scope > .md")?.lastElementChild ?? parts).classList.add("caret");
	if (!live) footOf(turn);
}

function footOf(turn) {
	const act = (name, run, what) => button(name, (event) => run(event.target), { "aria-label": what });
	const last = turn === talk.turns.at(-1);
	const foot = [];
	if (turn.content) foot.push(act("Copy", (button) => copyText(turn.content, button)));
	if (turn.role === "user") foot.push(act("Edit", () => edit(turn), "Edit this message"));
	else {
		foot.push(act("Retry", () => retry(turn), "Answer again"));
		if (last && turn.content && (turn.cut || turn.error)) foot.push(act("Continue", () => answer(turn), "Go on with this answer"));
	}
	turn.node.querySelector(".foot").replaceChildren(...(turn.stats ? [el("span.stats", statsText(turn.stats))] : []), el("div.acts", foot));
}

function statsText({ ttft, rate, tokens, prompt, cached, queue, reason }) {
	return [
		ttft !== undefined && `first token ${seconds(ttft)}`,
		rate && `${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`,
		tokens && plural(tokens, "token"),
		prompt && `${Math.round((100 * cached) / prompt)} % of ${count(prompt)} prompt tokens cached`,
		queue > 100 && `${seconds(queue)} in the queue`,
		{ length: "cut at its limit", stopped: "stopped" }[reason],
	].filter(Boolean).join(" · ");
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
	on(text, "keydown", (event) => {
		if (event.key === "Escape") { event.stopPropagation(); done(); }
		if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
	});
	body.replaceWith(text);
	turn.node.querySelector(".foot").replaceChildren(el("div.editing", {},
		button("Send", send, {}, "prime"),
		button("Cancel", done)));
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
	if (!talks.includes(talk)) { talk.at = Date.now(); talks.unshift(talk); }
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
	save(mine);
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
	save(mine);
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
		const load = told.load_progress;
		if (load) turn.wait = { text: load.state, of: 1, at: load.progress };
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
	$("log").ariaBusy = yes;
	if (yes) $("heard").textContent = "Answering.";
}

function showModels() {
	const sizeOf = (one) => [one.meta?.size && bytes(one.meta.size), one.meta?.n_ctx && `${count(one.meta.n_ctx)} tokens of context`].filter(Boolean).join(", ");
	$("models").replaceChildren(...models.map((one) => el("li", one.writes ? button(one.id, () => watchModel(one.id), { "aria-pressed": one.id === (watched || hello?.model) }) : el("b", one.id), ` ${one.writes ? "" : "vectors or scores, "}${one.state}`, el("div.hint", one.status?.detail ?? sizeOf(one)))));
	const writing = models.filter((one) => one.writes);
	const chosen = writing.some((one) => one.id === talk.model) ? talk.model : writing[0]?.id ?? "";
	const now = writing.map((one) => `${one.id} ${one.state}`).join("\n") + chosen;
	if (now !== showModels.was) {
		showModels.was = now;
		$("model").replaceChildren(...writing.map((one) => el("option", { value: one.id, textContent: one.state === "loaded" ? one.id : `${one.id} (${one.state})`, selected: one.id === chosen })));
	}
	const model = writing.find((one) => one.id === chosen);
	const room = model?.meta?.n_ctx;
	$("model-state").textContent = { loaded: room ? `${count(room)} tokens of context` : "", loading: model?.status.detail ?? "is being loaded", failed: "could not be loaded", unloaded: "is loaded with the first message" }[model?.state] ?? (models.length && !model ? "no model of this daemon writes text" : "");
}

function grow() {
	const box = $("say");
	box.style.height = "auto";
	box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight * 0.4)}px`;
}
function closeSide() { $("side").classList.remove("open"); $("menu").ariaExpanded = false; }

function exportAll() {
	const link = el("a", { href: URL.createObjectURL(new Blob([JSON.stringify(talks, kept, 1)], { type: "application/json" })), download: "conversations.json" });
	link.click();
}

// --- the batch ---

const COLOURS = ["#3a8f95", "#cf7a33", "#7b68bd", "#8d9b2f", "#c2577a", "#4a7fc4", "#a8803f", "#55996a"];
const MOST = 600, WIDTH = 7;
const view = { requests: [], waiting: 0, apps: {}, figures: {} };
let ticks = [], held = null, chosen = null, lastId = "", watching = null, drawing = 0;
const since = new Map(), colours = new Map(), rows = new Map(), unread = new Set();

function colourOf(app) {
	if (!colours.has(app)) { colours.set(app, COLOURS[colours.size % COLOURS.length]); showLegend(); }
	return colours.get(app);
}

/** Watch as long as the view is open; what was missed in between comes by its number. */
async function watch() {
	if ($("batch").hidden || document.hidden) { watching?.abort(); watching = null; return; }
	if (watching) return;
	const mine = watching = new AbortController();
	learnModels().catch(() => {});
	while (watching === mine) {
		try {
			const answered = await ask(`/events?ticks=1${watched && `&model=${encodeURIComponent(watched)}`}`, { signal: mine.signal, more: lastId ? { "Last-Event-ID": lastId } : {} });
			there(true);
			$("nothing").textContent = NOTHING;
			for await (const { data, id } of eventsOf(answered)) {
				lastId = id || lastId;
				take(JSON.parse(data));
			}
		} catch (error) {
			if (error.name === "AbortError") return;
			there(error instanceof Refused);
			if (error instanceof Refused) { view.requests = []; $("nothing").textContent = `${error.message}.`; showRequests(); }
		}
		if (watching !== mine) return;
		await new Promise((done) => setTimeout(done, 2000));
	}
}

const NOTHING = $("nothing").textContent;
let watched = ""; // whose ticks are shown
function forget() { ticks = []; since.clear(); unread.clear(); lastId = ""; }
function watchModel(id) {
	watched = id;
	forget();
	watching?.abort();
	watching = null;
	watch();
}

function take(told) {
	if (told.type === "hello") {
		if (hello && hello.daemon !== told.daemon) forget();
		hello = told;
		showModels();
		return;
	}
	Object.assign(view, told);
	for (const one of told.requests ?? []) if (one.lane === "background") unread.add(one.request);
	for (const [key, app] of Object.entries(told.apps ?? {})) colourOf(app ?? "-");
	for (const [n, took, predicted, allowed, solo, ballast, others, parts, step] of told.ticks ?? []) {
		const tick = { n, took, predicted, allowed, ballast, others, step, steps: new Map(), parts: parts.map(([key, tokens, drafts, prompt]) => ({ key, tokens, drafts, prompt, app: told.apps[key] ?? "-" })) };
		for (const [key, ms] of since) if (ms > 6e4) since.delete(key); else since.set(key, ms + took);
		for (const part of tick.parts) {
			if (part.prompt || unread.has(part.key)) continue;
			if (since.has(part.key)) tick.steps.set(part.key, since.get(part.key));
			since.set(part.key, 0);
		}
		ticks.push(tick);
	}
	if (ticks.length > MOST) ticks = ticks.slice(-MOST);
	drawing ||= requestAnimationFrame(showBatch);
}

function showBatch() {
	drawing = 0;
	draw();
	if (view.figures) showGauges();
	showRequests();
	showMemory();
	if ($("tabled").open) showTable();
}

const shownTicks = () => held ?? ticks;

function draw() {
	const canvas = $("ticks"), scale = devicePixelRatio || 1, { clientWidth: w, clientHeight: h } = canvas;
	if (!w) return;
	if (canvas.width !== Math.round(w * scale)) { canvas.width = Math.round(w * scale); canvas.height = Math.round(h * scale); }
	const ctx = canvas.getContext("2d"), style = getComputedStyle(canvas);
	ctx.setTransform(scale, 0, 0, scale, 0, 0);
	ctx.clearRect(0, 0, w, h);
	const seen = shownTicks().slice(-Math.floor((w - 56) / WIDTH));
	const heights = seen.map((tick) => Math.max(tick.took, ...tick.steps.values())).sort((a, b) => a - b);
	// One tick in thirty may stand out of the picture, so that the others can be told apart.
	const top = Math.max(4, 1.4 * (heights[Math.floor(0.97 * heights.length)] ?? 0), 1.4 * (seen.at(-1)?.step ?? 0));
	const unit = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5].find((one) => top / one <= 5) ?? 1e6;
	const y = (ms) => h - 6 - (Math.min(ms, top) / (top * 1.06)) * (h - 14);
	const x = (i) => w - (seen.length - i) * WIDTH;
	ctx.font = `11px ${style.fontFamily}`;
	ctx.textBaseline = "middle";
	for (let ms = 0; ms <= top; ms += unit) {
		ctx.fillStyle = style.borderTopColor;
		ctx.fillRect(52, y(ms) - 0.5, w - 52, 1);
		ctx.fillStyle = style.color;
		ctx.textAlign = "right";
		ctx.fillText(ms ? `${ms} ms` : "0", 48, y(ms));
	}
	const hatch = hatching(ctx, style.backgroundColor);
	seen.forEach((tick, i) => {
		const tokens = tick.parts.reduce((sum, part) => sum + part.tokens, 0) + tick.ballast;
		const height = y(0) - y(tick.took), share = tick.others ? (tokens ? 0.75 : 0) : 1;
		let at = y(0);
		const bar = (n, colour, pattern) => {
			const part = tokens ? (height * share * n) / tokens : 0;
			at -= part;
			ctx.fillStyle = colour;
			ctx.fillRect(x(i), at, WIDTH - 1.5, part);
			if (pattern) { ctx.fillStyle = pattern; ctx.fillRect(x(i), at, WIDTH - 1.5, part); }
		};
		for (const { tokens: n, drafts, prompt, app } of tick.parts) {
			bar(n - drafts, colourOf(app), prompt && hatch.prompt);
			if (drafts) bar(drafts, colourOf(app), hatch.drafts);
		}
		if (tick.ballast) bar(tick.ballast, style.borderTopColor, hatch.drafts);
		if (tick.others) { ctx.fillStyle = style.outlineColor; ctx.fillRect(x(i), at - height * (1 - share), WIDTH - 1.5, height * (1 - share)); }
		if (tick.n === chosen) { ctx.strokeStyle = style.caretColor; ctx.lineWidth = 2; ctx.strokeRect(x(i) - 1, y(tick.took) - 1, WIDTH + 0.5, height + 1); }
	});
	const line = (value, colour, width, dash) => {
		ctx.setLineDash(dash);
		ctx.strokeStyle = colour;
		ctx.lineWidth = width;
		ctx.beginPath();
		let on = false;
		seen.forEach((tick, i) => {
			const ms = value(tick);
			if (ms === undefined) return;
			if (ms === null) { on = false; return; }
			if (on) ctx.lineTo(x(i) + 3, y(ms)); else ctx.moveTo(x(i) + 3, y(ms));
			on = true;
		});
		ctx.stroke();
		ctx.setLineDash([]);
	};
	const readers = new Map(seen.flatMap((tick) => tick.parts.filter((part) => tick.steps.has(part.key)).map((part) => [part.key, part.app])));
	for (const [key, app] of readers) line((tick) => tick.steps.get(key), colourOf(app), 1.5, []);
	line((tick) => tick.step || null, style.caretColor, 1.5, [5, 4]);
}

function hatching(ctx, colour) {
	const made = (size, paint) => {
		const tile = el("canvas", { width: size, height: size }), inner = tile.getContext("2d");
		inner.strokeStyle = inner.fillStyle = colour;
		paint(inner);
		return ctx.createPattern(tile, "repeat");
	};
	return hatching[colour] ??= {
		prompt: made(5, (c) => { c.lineWidth = 1.4; c.beginPath(); for (const d of [-5, 0, 5]) { c.moveTo(d, 5); c.lineTo(d + 5, 0); } c.stroke(); }),
		drafts: made(3, (c) => c.fillRect(0, 0, 1.6, 1.6)),
	};
}

function showLegend() {
	const entry = (kind, text, colour) => { const mark = el("i", { className: kind }); if (colour) mark.style.color = colour; return el("span", mark, text); };
	$("legend").replaceChildren(
		...[...colours].slice(-12).map(([app, colour]) => entry("app", app, colour)),
		entry("prompt", "prompt"), entry("drafts", "drafts"), entry("ballast", "ballast"), entry("others", "another user"),
		entry("reader", "time since a reader's token before"), entry("step", "the promised step"));
}

function sayTick(tick) {
	if (!tick) return $("tick-said").replaceChildren();
	const parts = tick.parts.map((part) => button(`${part.app}, request ${part.key}: ${plural(part.tokens, part.prompt ? "prompt token" : "token")}${part.drafts ? `, ${part.drafts} drafted` : ""}`, () => explain(part.key)));
	const facts = [`Tick ${count(tick.n)} took ${seconds(tick.took)}`, tick.predicted && `predicted ${seconds(tick.predicted)}`, tick.allowed && `allowed ${seconds(tick.allowed)}`, tick.ballast && `${tick.ballast} rows of ballast`, tick.others && "other users had a part"];
	$("tick-said").replaceChildren(`${facts.filter(Boolean).join(", ")}. `, ...parts);
}
function choose(tick) {
	if (!tick) return;
	held ??= ticks.slice();
	chosen = tick.n;
	showPause();
	sayTick(tick);
	draw();
}
function chooseAt(event) {
	const seen = shownTicks(), { right } = $("ticks").getBoundingClientRect();
	choose(seen[seen.length - Math.ceil((right - event.clientX) / WIDTH)]);
}
function chooseBeside(event) {
	const seen = shownTicks(), at = seen.findIndex((tick) => tick.n === chosen);
	const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
	if (!by || !seen.length) return;
	event.preventDefault();
	choose(seen[Math.max(0, Math.min(seen.length - 1, (at < 0 ? seen.length : at) + by))]);
}
function pause() {
	held = held ? null : ticks.slice();
	if (!held) { chosen = null; sayTick(null); }
	showPause();
	draw();
}
function showPause() {
	$("pause").textContent = held ? "Go on" : "Pause";
	$("pause").ariaPressed = Boolean(held);
}

function showTable() {
	const cells = (name, values) => el("tr", values.map((value) => el(name, { textContent: value })));
	$("ticks-table").replaceChildren(el("thead", cells("th", ["Tick", "Took", "Predicted", "Allowed", "Ballast", "Requests"])),
		el("tbody", shownTicks().slice(-20).reverse().map((tick) => cells("td", [tick.n, seconds(tick.took), ms(tick.predicted || null), ms(tick.allowed), tick.ballast,
			tick.parts.map((part) => `${part.app} ${part.tokens}${part.prompt ? " prompt" : ""}`).join(", ") + (tick.others ? " and others" : "")]))));
}

const ms = (value) => (value === null || value === undefined ? "–" : value < 1000 ? `${value.toFixed(1)} ms` : seconds(value));
function showGauges() {
	const { interactive_p95_ms: p95, step_ms: step, ttft_ms: ttft, late_tokens_total: dry, interactive_shown_ms: shown, tokens_generated_per_s: made, tokens_per_s: computed, active_sessions: active, slots_total: slots, queued_sessions: queued } = view.figures;
	const late = Object.values(dry ?? {}).reduce((sum, n) => sum + n, 0);
	const rate = (value) => (value === null || value === undefined ? "–" : value.toFixed(value < 100 ? 1 : 0));
	const gauge = (name, value, note) => el("div.gauge", el("div.hint", name), el("div.value", value), el("div.hint", note));
	const promise = gauge("Between tokens, p95", ms(p95), step ? `promised ${ms(step)}` : "nobody reads now");
	if (step && p95) {
		const bar = el("div", { className: `meter ${p95 > step ? "late" : ""}`, role: "meter", "aria-label": "Shown against promised", title: `${p95} ms in the latest second`, "aria-valuemin": 0, "aria-valuemax": step * 2, "aria-valuenow": p95 }, el("i"));
		bar.firstChild.style.width = `${Math.min(100, (50 * p95) / step)}%`;
		promise.append(bar);
	}
	$("gauges").replaceChildren(promise,
		gauge("First token, p50", ms(ttft?.p50), `p95 ${ms(ttft?.p95)}`),
		gauge("Tokens/s", rate(made), `${rate(computed)} with prompts`),
		gauge("Later than promised", count(late), `of ${count(shown?.count ?? 0)} tokens shown, beside other work`),
		gauge("Slots", `${active ?? "–"} of ${slots ?? "–"}`, `${count(queued ?? 0)} waiting`));
}

function showRequests() {
	const list = view.requests ?? [], table = $("requests");
	$("nothing").hidden = list.length > 0;
	table.hidden = !list.length;
	$("request-count").textContent = list.length ? `${list.length} running or waiting` : "";
	if (!table.tHead) table.append(el("thead", el("tr", ["Request", "Program", "State", "Lane", "Prompt", "Answer", "Tokens/s", "Age", "Waits for"].map((name) => el("th", { scope: "col" }, name)))), el("tbody"));
	const now = new Set();
	let strangers = 0;
	list.slice(0, 100).forEach((one) => {
		const key = one.request ? `r${one.request}` : `o${strangers++}`;
		now.add(key);
		let row = rows.get(key);
		if (!row) {
			row = el("tr", Array.from({ length: 9 }, () => el("td")));
			if (one.request) row.cells[0].append(button(one.request, () => explain(one.request), { "aria-label": `Explain request ${one.request}` }));
			const mark = el("i.dot");
			mark.style.background = one.request ? colourOf(one.app ?? "-") : "";
			row.cells[1].append(mark, one.app ?? "-", models.length > 1 && one.model ? `, ${one.model}` : "");
			rows.set(key, row);
			table.tBodies[0].append(row);
		}
		const mine = one.request !== undefined;
		const prompt = mine ? `${count(one.computed)} of ${count(one.prompt)}${one.cached ? `, ${count(one.cached)} cached` : ""}` : "";
		[one.state, one.lane + (one.awaits === "answer" ? ", whole answer" : ""), prompt, mine ? count(one.out) : "", mine && one.out ? one.per_s.toFixed(1) : "", mine ? seconds(one.age_s * 1000) : "", one.waits ?? ""].forEach((text, i) => {
			const cell = row.cells[i + 2];
			if (cell.textContent !== text) cell.textContent = text;
		});
	});
	for (const [key, row] of rows) if (!now.has(key)) { row.remove(); rows.delete(key); }
}

function showMemory() {
	if (!view.cells) return; // counts are told to operators
	const [used, reserved, total] = view.cells ?? [0, 0, 0], part = (n) => `${total ? (100 * n) / total : 0}%`;
	const bar = el("div.meter.cells", { role: "img", "aria-label": `${count(used)} of ${count(total)} cells used` }, el("i"), el("b"));
	bar.children[0].style.width = part(used);
	bar.children[1].style.width = part(Math.max(0, reserved - used));
	const facts = [["KV cells", `${count(used)} used, ${count(reserved)} reserved of ${count(total)}`]];
	if (view.prefixes) {
		const [leaves, leafTokens, pages, size] = view.prefixes;
		facts.push(["Prefixes in the cache", `${count(leaves)}, ${count(leafTokens)} tokens`], ["Saved pages", `${count(pages)}, ${bytes(size)}`]);
	}
	$("memory").replaceChildren(bar, ...facts.flatMap(([name, text]) => [el("dt", name), el("dd", text)]));
}

let telling = 0;
async function explain(request) {
	clearTimeout(telling);
	const dialog = $("story");
	try {
		const { requests: [story], told } = await (await ask(`/explain?request=${request}`)).json();
		const [head, ...rest] = told;
		$("story-title").textContent = `Request ${request}${story.app ? `, ${story.app}` : ""}`;
		$("story-body").replaceChildren(el("p", head), el("ul", rest.map((text) => el("li", text))));
		if (!story.reason) telling = setTimeout(() => { if (dialog.open) explain(request); }, 1000);
	} catch (error) {
		$("story-title").textContent = `Request ${request}`;
		$("story-body").replaceChildren(el("p", { textContent: error instanceof Refused ? `${error.message}.` : "The daemon does not answer." }));
	}
	if (!dialog.open) { dialog.showModal(); $("story-title").focus(); }
}

// --- views, keys, start ---

function route() {
	const batch = location.hash === "#/batch";
	$("chat").hidden = batch;
	$("batch").hidden = !batch;
	$("to-chat").ariaCurrent = batch ? null : "page";
	$("to-batch").ariaCurrent = batch ? "page" : null;
	$("menu").hidden = batch;
	document.title = batch ? "Batch · uma-trio" : "uma-trio";
	watch();
}

let before = "";
const to = (name) => { location.hash = `#/${name}`; };
const KEYS = {
	"gc": () => to("chat"), "gb": () => to("batch"), "/": () => { to("chat"); $("say").focus(); }, "n": () => { to("chat"); $("new-chat").click(); $("say").focus(); },
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
	on("composer", "submit", (event) => { event.preventDefault(); submit(); });
	on("say", "keydown", (event) => {
		if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
	});
	on("say", "input", grow);
	on("stop", "click", () => talk.run?.abort.abort());
	on("new-chat", "click", () => { talk = fresh(); go(talk); });
	on("export", "click", exportAll);
	on("forget", "click", () => {
		if (!confirm("Delete all conversations in this browser?")) return;
		for (const one of talks) remove(one);
		forgetStored((key) => key.startsWith(STORED));
	});
	on("show-settings", "click", () => {
		const open = ($("settings").hidden = !$("settings").hidden);
		$("show-settings").ariaExpanded = !open;
	});
	on("settings", "submit", (event) => event.preventDefault());
	for (const name of FIELDS) $(name).addEventListener("change", () => { if ($(name).reportValidity()) { talk.said[name] = $(name).value; save(talk); } });
	on("model", "change", () => { talk.model = $("model").value; showModels(); save(talk); });
	on("menu", "click", () => ($("menu").ariaExpanded = $("side").classList.toggle("open")));
	on("log", "scroll", () => { stays = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 40; });
	on("log", "click", closeSide);
	on("key-form", "submit", () => { sessionStorage.setItem("uma.key", $("key").value.trim()); $("key").value = ""; learnModels().catch(() => {}); });
	on("forget-key", "click", () => { sessionStorage.removeItem("uma.key"); location.reload(); });
	on("show-keys", "click", () => { $("forget-key").hidden = !sessionStorage.getItem("uma.key"); $("keys").showModal(); });
	for (const button of document.querySelectorAll("[data-close]")) on(button, "click", () => button.closest("dialog").close());
	on(window, "hashchange", route);
	on(window, "keydown", onKey);
	on(window, "pagehide", saveNow);
	on(window, "pageshow", (event) => { if (event.persisted) { catchUp(); showTalks(); } });
	on(window, "storage", onStored);
	on(document, "visibilitychange", () => { if (document.hidden) saveNow(); lookNow(); watch(); });
	on("pause", "click", pause);
	on("ticks", "click", chooseAt);
	on("ticks", "keydown", chooseBeside);
	new ResizeObserver(draw).observe($("ticks"));
	on(matchMedia("(prefers-color-scheme: dark)"), "change", draw);
	on("tabled", "toggle", showTable);
	showLegend();
	route();
	showTalk();
	keepLearning();
}

start();
