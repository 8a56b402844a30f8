// Formatted text: a worker makes HTML from Markdown, DOMPurify makes safe elements from it, KaTeX draws formulas.
// All of them are loaded after the first paint; until then, and where they fail, text is shown as it was written.

import { button, copy, el } from "./dom.js";

const DEADLINE_MS = 2500;
// Characters, and blocks of a text. What has more is shown as it was written.
const LONGEST_TEXT = 300_000, LONGEST_HTML = 600_000, LONGEST_FORMULA = 4000, MOST_BLOCKS = 2000;
const SLICE_MS = 8;

const TAGS = ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p", "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"];
const SAFE = {
	ALLOWED_TAGS: TAGS,
	ALLOWED_ATTR: ["align", "checked", "class", "disabled", "href", "start", "title", "type"],
	ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
	ADD_URI_SAFE_ATTR: ["align", "checked", "disabled", "start", "type"], // the pattern above is for addresses
	ALLOW_DATA_ATTR: false,
	ALLOW_ARIA_ATTR: false,
	RETURN_DOM_FRAGMENT: true,
};

let worker = null, isReady = false, isBroken = false, purify = null;
let current = null, deadline = 0;
const waiting = new Map(); // element: what it shall show
const shown = new WeakMap(); // element: what it shows, or is about to
const refused = new WeakSet(); // elements whose text took too long

/** Load what formats text. Not needed for the first paint. */
export async function loadFormatter() {
	try {
		await import("./vendor/dompurify/purify.min.js");
		purify = globalThis.DOMPurify;
		startWorker();
	} catch {
		giveUp();
	}
}

/** Show text as it was written from now on, also what waits. */
function giveUp() {
	isBroken = true;
	if (current) finish(null);
	for (const [element, { text }] of waiting) showPlain(element, text);
	waiting.clear();
}

let trustedUrl = null;
function workerUrl() {
	const url = new URL("markdown_worker.js", import.meta.url).href;
	// Browsers with Trusted Types start workers only from the address that a policy names.
	return trustedUrl ??= globalThis.trustedTypes?.createPolicy("uma-worker", { createScriptURL: () => url }).createScriptURL("") ?? url;
}

function startWorker() {
	isReady = false;
	const mine = worker = new Worker(workerUrl(), { type: "module" });
	mine.onmessage = ({ data }) => {
		if (mine !== worker) return; // it was ended, and had answered meanwhile
		if (data.isReady) isReady = true; else finish(data.blocks);
		next();
	};
	mine.onerror = giveUp;
}

/** Show a text in an element, now or when it is formatted. A text that grows is shown as fast as it can be formatted. */
export function show(element, text, isAnswer) {
	const job = { text, isAnswer };
	if (shown.get(element)?.text === text) return;
	if (!shown.has(element) || refused.has(element) || isBroken) showPlain(element, text);
	shown.set(element, job);
	if (isBroken || refused.has(element)) return;
	waiting.set(element, job);
	next();
}

function showPlain(element, text) {
	element.classList.add("plain");
	element.textContent = text;
}

function next() {
	if (current || !isReady || isBroken) return;
	const [element, job] = waiting.entries().next().value ?? [];
	if (!element) return;
	waiting.delete(element);
	if (!element.isConnected) { // another conversation is open
		shown.delete(element);
		return next();
	}
	current = element;
	if (job.text.length > LONGEST_TEXT) {
		finish(null);
		return next();
	}
	deadline = setTimeout(() => {
		worker.terminate();
		finish(null);
		startWorker();
	}, DEADLINE_MS);
	worker.postMessage(job);
}

function finish(blocks) {
	const element = current;
	clearTimeout(deadline);
	current = null;
	if (blocks && blocks.length <= MOST_BLOCKS && blocks.every((html) => html.length < LONGEST_HTML)) place(element, blocks);
	else {
		refused.add(element);
		showPlain(element, shown.get(element).text);
	}
	element.dispatchEvent(new Event("formatted", { bubbles: true }));
}

/** Show blocks; those that are as before stay, with what is selected in them. */
function place(element, blocks) {
	if (element.classList.contains("plain")) element.replaceChildren();
	element.classList.remove("plain");
	blocks.forEach((html, i) => {
		const old = element.children[i];
		if (old?.html === html) return;
		const block = el("div.block", { html }, finished(purify.sanitize(html, SAFE)));
		if (old) old.replaceWith(block); else element.append(block);
	});
	while (element.children.length > blocks.length) element.lastElementChild.remove();
}

/** Add what HTML of Markdown does not have: buttons, labels, regions to scroll, formulas. */
function finished(fragment) {
	for (const link of fragment.querySelectorAll("a[href]")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
	for (const code of fragment.querySelectorAll("pre > code")) {
		const language = code.className.replace("language-", "");
		const copier = button("Copy", () => copy(code.textContent, copier), { "aria-label": "Copy this code" });
		const pre = code.parentElement;
		pre.tabIndex = 0;
		const frame = el("div.code", el("div.code-head", el("span", language || "text"), copier));
		pre.replaceWith(frame);
		frame.append(pre);
	}
	for (const table of fragment.querySelectorAll("table")) {
		const region = el("div.scroll", { tabIndex: 0, role: "region", "aria-label": "Table" });
		table.replaceWith(region);
		region.append(table);
	}
	for (const box of fragment.querySelectorAll("input")) {
		const isDone = box.checked;
		box.closest("li")?.classList.add("task");
		box.replaceWith(el("input", { type: "checkbox", checked: isDone, disabled: true, "aria-label": isDone ? "done" : "to do" }));
	}
	for (const formula of fragment.querySelectorAll(".math")) if (formula.textContent.length < LONGEST_FORMULA) formulas.push(formula);
	drawFormulas();
	return fragment;
}

const formulas = [];
let katex = null, drawing = false;

/** Draw the formulas that wait, a slice of time at once. */
async function drawFormulas() {
	if (drawing || !formulas.length) return;
	drawing = true;
	try {
		katex ??= await loadKatex();
		while (formulas.length) {
			const end = performance.now() + SLICE_MS;
			while (formulas.length && performance.now() < end) drawFormula(formulas.shift());
			await new Promise((resolve) => setTimeout(resolve, SLICE_MS));
		}
	} catch {
		formulas.length = 0; // they stay TeX
	} finally {
		drawing = false;
	}
}

async function loadKatex() {
	document.head.append(el("link", { rel: "stylesheet", href: new URL("vendor/katex/katex.min.css", import.meta.url).href }));
	await import("./vendor/katex/katex.min.js");
	return globalThis.katex;
}

function drawFormula(formula) {
	const source = formula.textContent, drawn = document.createElement("span");
	try {
		katex.render(source, drawn, { displayMode: formula.classList.contains("display"), strict: "ignore", trust: false, maxSize: 50, maxExpand: 300 });
		formula.replaceChildren(drawn);
	} catch {
		formula.classList.add("wrong"); // no TeX that KaTeX knows: it is shown as it was written
	}
}
