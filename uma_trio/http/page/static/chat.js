// The conversation that is open: its messages, their versions, and the answers that are being written.

import { bodyOf, stream, textOf } from "./answers.js";
import { append, choose, path, versionsOf } from "./conversations.js";
import { daemon, lookNow, Refused, setPresence } from "./daemon.js";
import { $, button, bytes, copy, count, duration, el, on, plural } from "./dom.js";
import { show } from "./markdown.js";

const SAVE_MS = 2000, ELSEWHERE_MS = 6000;

let store = null;
const runs = new Map(); // conversation: the answer that is being written: {abort, message, startedAt, wait, announced}
const nodes = new WeakMap(); // message: its element
const elsewhere = new WeakMap(); // message: when another tab wrote to it
let isAtEnd = true; // the reader has not scrolled up
let isLeaving = false; // the page is being closed or reloaded, which ends its requests

export const isAnswering = (conversation) => runs.has(conversation);
export function stop(conversation = store.current) { runs.get(conversation)?.abort.abort(); }

export function startChat(theStore) {
	store = theStore;
	store.addEventListener("open", () => { isAtEnd = true; showConversation(); });
	store.addEventListener("remove", ({ detail }) => stop(detail.conversation));
	store.addEventListener("change", ({ detail: { conversation, messages } }) => {
		for (const message of messages) elsewhere.set(message, Date.now());
		if (conversation !== store.current) return;
		showConversation();
		if (messages.some(({ partial }) => partial)) setTimeout(showConversation, ELSEWHERE_MS + 100);
	});
	daemon.addEventListener("models", () => { if (!path(store.current).length) showConversation(); });
	on("log", "scroll", () => { isAtEnd = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 40; });
	on("log", "formatted", toEnd);
	on(window, "beforeunload", () => {
		isLeaving = true;
		setTimeout(() => { isLeaving = false; }, 1000); // the person stayed
	});
}

// --- answers ---

/** Say something below `parent` (null: at the beginning) and have it answered. */
export function say(conversation, parent, content, files = []) {
	conversation.title ||= (content || files[0].name).replace(/\s+/g, " ").slice(0, 80);
	conversation.at = Date.now();
	const question = append(conversation, parent, { role: "user", content, files });
	store.touch(conversation);
	answer(conversation, question);
}

const lastOf = (conversation) => path(conversation).at(-1) ?? null;
export const sayNext = (content, files) => say(store.current, lastOf(store.current), content, files);

/** Write another answer to a message; those that there are stay as versions. */
function answer(conversation, question) {
	write(conversation, append(conversation, question, { role: "assistant", content: "", reasoning: "", calls: [] }));
}

/** Write an answer, from where it ends. */
async function write(conversation, message) {
	stop(conversation);
	const body = bodyOf(conversation, path(conversation));
	const run = { abort: new AbortController(), message, startedAt: performance.now(), wait: { text: "Waiting for a slot…" }, announced: message.content.length };
	runs.set(conversation, run);
	Object.assign(message, { error: "", partial: true, stats: {}, model: body.model });
	store.touch(conversation, message);
	const saving = setInterval(() => store.touch(conversation, message), SAVE_MS);
	isAtEnd = true;
	$("heard").replaceChildren(el("p", "Answering."));
	showConversation();
	let frame = 0;
	try {
		await stream(body, message, run, () => {
			frame ||= requestAnimationFrame(() => { frame = 0; if (conversation === store.current) { showMessage(message); announce(run); toEnd(); } });
		});
		setPresence(true);
	} catch (error) {
		if (isLeaving) message.error = ""; // it is marked as interrupted
		else if (error.name === "AbortError") message.stats.reason = "stopped";
		else {
			message.error = error instanceof Refused ? error.message : "The daemon has gone away.";
			if (!(error instanceof Refused)) setPresence(false);
			lookNow();
		}
	} finally {
		cancelAnimationFrame(frame);
		clearInterval(saving);
	}
	if (runs.get(conversation) === run) runs.delete(conversation);
	store.touch(conversation, message);
	if (conversation !== store.current) return;
	announce(run, message.error ? "The answer failed." : message.stats.reason === "stopped" ? "Stopped." : "The answer is complete.");
	showConversation();
}

/** Let screen readers say what has come: whole paragraphs, not tokens. */
function announce(run, end) {
	const { content } = run.message;
	const to = end ? content.length : content.lastIndexOf("\n\n");
	const paragraphs = content.slice(run.announced, Math.max(run.announced, to)).split(/\n{2,}/);
	run.announced = Math.max(run.announced, to);
	for (const text of [...paragraphs, end]) if (text?.trim()) $("heard").append(el("p", text));
}

function toEnd() { if (isAtEnd) $("log").scrollTop = $("log").scrollHeight; }

// --- what is shown ---

export function showConversation() {
	const messages = path(store.current), log = $("log");
	const wanted = messages.length ? messages.map(nodeOf) : [welcome()];
	if (wanted.length !== log.children.length || wanted.some((node, i) => node !== log.children[i])) log.replaceChildren(...wanted);
	messages.forEach(showMessage);
	const isRunning = runs.has(store.current);
	$("send").hidden = isRunning;
	$("stop").hidden = !isRunning;
	log.ariaBusy = isRunning;
	toEnd();
}

/** What the open model can do well. The smallest ones only tell stories. */
function promptsFor(model) {
	if (!model?.isChat) return [];
	if (/cod(e|er|ing)|starcoder|devstral/i.test(model.id)) return ["Write a Python function that merges overlapping intervals", "Explain what this regular expression matches: ^(?=.*\\d).{8,}$", "Write an SQL query for the three newest orders of each customer"];
	if (model.id === "storyteller" || model.meta?.n_params < 1e8) return ["Tell me a story about a fox and a lantern", "Tell me a story about a girl who found a key", "Tell me a story about a boat in the rain"];
	return ["Explain how a transistor works, with an everyday comparison", "Compare three ways to learn a language, as a table", "Write a haiku about waiting"];
}

function welcome() {
	const model = daemon.models.find(({ id }) => id === store.current.model) ?? daemon.models.find(({ isChat }) => isChat);
	const prompts = promptsFor(model), state = prompts.join("\n");
	const old = $("log").querySelector(".welcome");
	if (old?.dataset.state === state) return old;
	const made = el("div.welcome", el("h2", "What would you like to know?"),
		el("p", "Answers come from the model on this machine. Nothing leaves it."),
		el("div.prompts", prompts.map((text) => button(text, () => sayNext(text), {}, "offer"))));
	made.dataset.state = state;
	return made;
}

function nodeOf(message) {
	if (!nodes.has(message)) {
		const isMine = message.role === "user";
		nodes.set(message, el("article", { className: `turn ${isMine ? "user" : "model"}`, "aria-label": isMine ? "You" : "Answer" },
			el("div.who"), el("div.body"), el("div.foot")));
	}
	return nodes.get(message);
}

/** Bring the element of a message up to date; what has not changed in it stays, with its focus and selection. */
function showMessage(message) {
	const node = nodeOf(message);
	if (node.querySelector(".editing")) return;
	const body = node.querySelector(".body"), isMine = message.role === "user";
	node.querySelector(".who").textContent = isMine ? "You" : message.model || "Model";
	node.classList.toggle("partial", isInterrupted(message));
	if (isMine) showQuestion(body, message); else showAnswer(body, message);
	showFoot(node.querySelector(".foot"), message);
}

/** Return the part of this name, made once; without `make`, remove it. */
function part(body, name, make) {
	const found = body.querySelector(`:scope > .${name}`);
	if (make) return found ?? body.appendChild(make());
	return found?.remove();
}

function showQuestion(body, { content, files }) {
	(files ?? []).forEach(({ name, text }, i) => part(body, `file-${i}`, () =>
		el("details", { className: `file file-${i}` }, el("summary", name, el("span.hint", ` ${bytes(text.length)}`)), el("pre", { tabIndex: 0 }, text))));
	if (content) show(part(body, "md", () => el("div.md")), content, false);
}

function showAnswer(body, message) {
	const { reasoning, content, calls, error } = message, run = runOf(message);
	if (reasoning) {
		const thought = part(body, "thought", () => el("details.thought", el("summary"), el("div.text")));
		thought.firstChild.textContent = run && !content ? "Reasoning…" : `Reasoning, ${plural(reasoning.trim().split(/\s+/).length, "word")}`;
		if (thought.lastChild.textContent !== reasoning) thought.lastChild.textContent = reasoning;
	} else part(body, "thought");
	if (content) show(part(body, "md", () => el("div.md")), content, true); else part(body, "md");
	calls?.forEach((call, i) => {
		const shown = part(body, `call-${i}`, () => el("details", { className: `call call-${i}`, open: true }, el("summary"), el("pre", { tabIndex: 0 })));
		shown.firstChild.textContent = `Calls ${call.name}`;
		shown.lastChild.textContent = call.arguments;
	});
	part(body, "wait");
	if (run?.wait) {
		const { text, value, max } = run.wait;
		body.append(el("div.wait", el("span", text), max && el("progress", { max, value, "aria-label": text })));
	}
	if (error) part(body, "error", () => el("div.error", { role: "alert" })).textContent = error; else part(body, "error");
	body.classList.toggle("caret", Boolean(run && !run.wait));
}

const runOf = (message) => [...runs.values()].find((run) => run.message === message);
const isElsewhere = (message) => message.partial && !message.error && !message.stats?.reason && Date.now() - (elsewhere.get(message) ?? 0) < ELSEWHERE_MS;
const isInterrupted = (message) => message.role === "assistant" && message.partial && !runOf(message) && !isElsewhere(message);

function showFoot(foot, message) {
	const run = runOf(message), versions = versionsOf(store.current, message), at = versions.indexOf(message);
	const isLast = message === lastOf(store.current);
	const facts = run ? "" : statsOf(message);
	const state = JSON.stringify([Boolean(run), isLast, versions.length, at, facts, Boolean(textOf(message)), isInterrupted(message), isElsewhere(message)]);
	if (foot.dataset.state === state) return; // or the focus would be lost
	foot.dataset.state = state;
	const actions = [];
	if (!run && textOf(message)) {
		const copier = button("Copy", () => copy(message.content, copier), { "aria-label": message.role === "user" ? "Copy this message" : "Copy this answer" });
		actions.push(copier);
	}
	if (message.role === "user") actions.push(button("Edit", () => edit(message), { "aria-label": "Edit this message" }));
	else if (!run) {
		actions.push(button("Retry", () => retry(message), { "aria-label": "Retry this answer" }));
		if (isLast && message.content && isInterrupted(message)) actions.push(button("Continue", () => write(store.current, message), { "aria-label": "Continue this answer" }));
	}
	foot.replaceChildren(...(facts ? [el("span.stats", facts)] : []),
		...(versions.length > 1 ? [versionSwitch(message, versions, at)] : []), el("div.acts", actions));
}

function versionSwitch(message, versions, at) {
	const to = (step, sign, label) => button(sign, () => switchTo(versions[at + step], label), { "aria-label": label, disabled: !versions[at + step] }, "quiet.step");
	return el("div.versions", { role: "group", "aria-label": "Versions" },
		to(-1, "‹", "Previous version"), el("span", `${at + 1} of ${versions.length}`), to(1, "›", "Next version"));
}

function switchTo(message, label) {
	isAtEnd = false;
	choose(store.current, message);
	store.touch(store.current);
	showConversation();
	const steps = [...nodeOf(message).querySelectorAll(".step")];
	(steps.find((step) => step.ariaLabel === label && !step.disabled) ?? steps.find((step) => !step.disabled))?.focus();
}

const ENDS = { length: "cut at the limit of tokens", stopped: "stopped" };
function statsOf(message) {
	const { ttft, rate, tokens, prompt, cached, queue, reason } = message.stats ?? {};
	return [
		isElsewhere(message) && "another tab is writing this answer",
		isInterrupted(message) && `Not complete: ${ENDS[reason] ?? (message.error ? "it failed" : "interrupted")}`,
		ttft !== undefined && `first token ${duration(ttft)}`,
		rate && `${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`,
		tokens && plural(tokens, "token"),
		prompt && `${Math.round((100 * cached) / prompt)} % of ${count(prompt)} prompt tokens cached`,
		queue > 100 && `${duration(queue)} in the queue`,
	].filter(Boolean).join(" · ");
}

const messageOf = (id) => store.current.messages.find((message) => message.id === id) ?? null;

function retry(message) {
	answer(store.current, messageOf(message.parent));
}

/** Let a message be changed; what is sent is a new version of it. */
function edit(message) {
	const node = nodeOf(message), body = node.querySelector(".body");
	const text = el("textarea", { value: message.content, "aria-label": "The message", rows: 3 });
	const leave = () => {
		form.remove();
		body.hidden = node.querySelector(".foot").hidden = false;
	};
	const send = () => {
		const content = text.value.trim();
		if (!content && !message.files?.length) return;
		leave();
		say(store.current, messageOf(message.parent), content, message.files);
	};
	const form = el("div.editing", text, el("div.buttons", button("Cancel", leave), button("Send", send, {}, "prime")));
	on(text, "keydown", (event) => {
		if (event.key === "Escape") { event.stopPropagation(); leave(); node.querySelector(".acts button:last-child").focus(); }
		if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
	});
	body.hidden = node.querySelector(".foot").hidden = true;
	node.append(form);
	text.focus();
}
