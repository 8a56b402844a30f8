// What the daemon computes: figures, ticks, requests, memory, models. Watched only while it is visible.

import { colourOf, draw, pick, pickNext, MOST_TICKS } from "./ticks_chart.js";
import { daemon, eventsOf, fetchModels, Refused, request, setPresence } from "./daemon.js";
import { $, button, bytes, count, duration, el, on, plural } from "./dom.js";
import { sizeOf } from "./settings.js";

const RETRY_MS = 2000, FORGOTTEN_MS = 60_000, MOST_ROWS = 100;
const IDLE = "Nothing is running. Requests of your programs appear here while they last.";

const latest = { requests: [], figures: {} }; // the newest of each part of the events
let ticks = [], paused = null, selected = null; // `paused`: the ticks that stay in the picture
let hello = null, model = "", lastId = "", watching = null, frame = 0;
const sinceToken = new Map(), unread = new Set(), rows = new Map();

export function startBatch() {
	on("pause", "click", togglePause);
	on("ticks", "click", (event) => select(pick(shownTicks(), event)));
	on("ticks", "keydown", (event) => {
		const tick = pickNext(shownTicks(), selected, event.key);
		if (tick) { event.preventDefault(); select(tick); }
	});
	on("table", "toggle", showTable);
	new ResizeObserver(drawTicks).observe($("ticks"));
	on(matchMedia("(prefers-color-scheme: dark)"), "change", drawTicks);
	daemon.addEventListener("models", showModels);
	showLegend();
}

/** Begin or end watching, as the view is visible or not. What is missed in between comes by the number of the last event. */
export async function watch() {
	if ($("batch").hidden || document.hidden) { watching?.abort(); watching = null; return; }
	if (watching) return;
	const mine = watching = new AbortController();
	fetchModels().catch(() => {});
	while (watching === mine) {
		try {
			const query = model ? `&model=${encodeURIComponent(model)}` : "";
			const response = await request(`/events?ticks=1${query}`, { signal: mine.signal, headers: lastId ? { "Last-Event-ID": lastId } : {} });
			setPresence(true);
			$("idle").textContent = IDLE;
			for await (const { data, id } of eventsOf(response)) {
				lastId = id || lastId;
				take(JSON.parse(data));
			}
		} catch (error) {
			if (error.name === "AbortError") return;
			setPresence(error instanceof Refused);
			if (error instanceof Refused) { latest.requests = []; $("idle").textContent = `${error.message}.`; showRequests(); }
		}
		if (watching !== mine) return;
		await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
	}
}

function reset() { ticks = []; sinceToken.clear(); unread.clear(); lastId = ""; }

function watchModel(id) {
	model = id;
	reset();
	watching?.abort();
	watching = null;
	watch();
}

function take(event) {
	if (event.type === "hello") {
		if (hello && hello.daemon !== event.daemon) reset();
		hello = event;
		showModels();
		return;
	}
	Object.assign(latest, event);
	for (const { lane, request } of event.requests ?? []) if (lane === "background") unread.add(request);
	for (const app of Object.values(event.apps ?? {})) colourOf(app ?? "-");
	for (const tick of event.ticks ?? []) ticks.push(parseTick(tick, event.apps));
	ticks = ticks.slice(-MOST_TICKS);
	frame ||= requestAnimationFrame(showBatch);
}

/** Return a tick with, for each request whose tokens are read, the time since its token before (`gaps`). */
function parseTick([n, took, predicted, allowed, , ballast, others, parts, step], apps) {
	const tick = { n, took, predicted, allowed, ballast, others, step, gaps: new Map(), parts: parts.map(([key, tokens, drafts, isPrompt]) => ({ key, tokens, drafts, isPrompt, app: apps[key] ?? "-" })) };
	for (const [key, ms] of sinceToken) if (ms > FORGOTTEN_MS) sinceToken.delete(key); else sinceToken.set(key, ms + took);
	for (const { key, isPrompt } of tick.parts) {
		if (isPrompt || unread.has(key)) continue;
		if (sinceToken.has(key)) tick.gaps.set(key, sinceToken.get(key));
		sinceToken.set(key, 0);
	}
	return tick;
}

function showBatch() {
	frame = 0;
	drawTicks();
	showGauges();
	showRequests();
	showMemory();
	showLegend();
	if ($("table").open) showTable();
}

const shownTicks = () => paused ?? ticks;
export function drawTicks() { draw($("ticks"), shownTicks(), selected); }

// --- ticks ---

function showLegend() {
	const entry = (kind, text, title, colour) => {
		const mark = el("i", { className: kind });
		if (colour) mark.style.color = colour;
		return el("span", { title }, mark, text);
	};
	const entries = [
		...[...colourOf.known].slice(-12).map(([app, colour]) => ["app", app, undefined, colour]),
		["prompt", "prompt", "tokens of prompts"], ["drafts", "drafts", "tokens that were guessed, and are checked together"],
		["ballast", "ballast", "rows that fill the batch up to a size that is computed faster"], ["others", "another user", undefined],
		["reader", "time since a reader's token before", undefined], ["step", "the promised step", "readers get a token at least this often"],
	];
	const state = JSON.stringify(entries);
	if ($("legend").dataset.state === state) return;
	$("legend").dataset.state = state;
	$("legend").replaceChildren(...entries.map((each) => entry(...each)));
}

function select(tick) {
	if (!tick) return;
	paused ??= ticks.slice();
	selected = tick.n;
	showPause();
	showTick(tick);
	drawTicks();
}

function showTick(tick) {
	if (!tick) return $("tick").replaceChildren();
	const facts = [
		`Tick ${count(tick.n)} took ${duration(tick.took)}`,
		tick.predicted && `predicted ${duration(tick.predicted)}`,
		tick.allowed && `allowed ${duration(tick.allowed)}`,
		tick.ballast && `${tick.ballast} rows of ballast`,
		tick.others && "other users had a part",
	];
	$("tick").replaceChildren(`${facts.filter(Boolean).join(", ")}. `, ...tick.parts.map(({ app, key, tokens, isPrompt, drafts }) =>
		button(`${app}, request ${key}: ${plural(tokens, isPrompt ? "prompt token" : "token")}${drafts ? `, ${drafts} drafted` : ""}`, () => explain(key))));
}

function togglePause() {
	paused = paused ? null : ticks.slice();
	if (!paused) { selected = null; showTick(null); }
	showPause();
	drawTicks();
}
function showPause() {
	$("pause").textContent = paused ? "Go on" : "Pause";
	$("pause").ariaPressed = Boolean(paused);
}

const ms = (value) => (value === null || value === undefined ? "–" : value < 1000 ? `${value.toFixed(1)} ms` : duration(value));

function showTable() {
	const row = (name, values) => el("tr", values.map((value) => el(name, { textContent: value })));
	$("ticks-table").replaceChildren(el("thead", row("th", ["Tick", "Took", "Predicted", "Allowed", "Ballast", "Requests"])),
		el("tbody", shownTicks().slice(-20).reverse().map((tick) => row("td", [
			tick.n, duration(tick.took), ms(tick.predicted || null), ms(tick.allowed), tick.ballast,
			tick.parts.map(({ app, tokens, isPrompt }) => `${app} ${tokens}${isPrompt ? " prompt" : ""}`).join(", ") + (tick.others ? " and others" : ""),
		]))));
}

// --- figures, requests, memory, models ---

function showGauges() {
	const {
		interactive_p95_ms: p95, step_ms: step, ttft_ms: ttft, late_tokens_total: dry, interactive_shown_ms: shown, interval_s: interval,
		tokens_generated_per_s: generated, tokens_per_s: computed, active_sessions: active, slots_total: slots, queued_sessions: queued,
	} = latest.figures ?? {};
	const late = Object.values(dry ?? {}).reduce((sum, n) => sum + n, 0);
	const rate = (value) => (value === null || value === undefined ? "–" : value.toFixed(value < 100 ? 1 : 0));
	const gauge = (name, value, note) => el("div.gauge", el("div.hint", name), el("div.value", value), el("div.hint", note));
	const promise = gauge("Between tokens, p95", ms(p95), step ? `promised ${ms(step)}` : "nobody reads now");
	if (step && p95) {
		const bar = el("div", { className: `meter ${p95 > step ? "late" : ""}`, role: "meter", "aria-label": "Shown against promised", title: `${p95} ms in the latest second`, "aria-valuemin": 0, "aria-valuemax": step * 2, "aria-valuenow": p95 }, el("i"));
		bar.firstChild.style.width = `${Math.min(100, (50 * p95) / step)}%`;
		promise.append(bar);
	}
	const seconds = Math.round(interval ?? 0) || "few";
	$("gauges").replaceChildren(promise,
		gauge("First token, p50", ms(ttft?.p50), `p95 ${ms(ttft?.p95)}`),
		gauge(`Tokens/s, all requests, last ${seconds} s`, rate(generated), `${rate(computed)} with prompts`),
		gauge("Later than promised", count(late), `of ${count(shown?.count ?? 0)} tokens shown while other work ran`),
		gauge("Slots", `${active ?? "–"} of ${slots ?? "–"}`, `${count(queued ?? 0)} waiting`));
}

const COLUMNS = ["Request", "Program", "State", "Lane", "Prompt", "Answer", "Tokens/s since its first", "Age", "Waits for"];

function showRequests() {
	const list = latest.requests ?? [], table = $("requests");
	$("idle").hidden = list.length > 0;
	table.hidden = !list.length;
	$("request-count").textContent = list.length ? `${list.length} running or waiting` : "";
	if (!table.tHead) table.append(el("thead", el("tr", COLUMNS.map((name) => el("th", { scope: "col" }, name)))), el("tbody"));
	const present = new Set();
	let strangers = 0;
	for (const each of list.slice(0, MOST_ROWS)) {
		const isMine = each.request !== undefined, key = isMine ? `r${each.request}` : `o${strangers++}`;
		present.add(key);
		const row = rows.get(key) ?? addRow(key, each);
		const prompt = isMine ? `${count(each.computed)} of ${count(each.prompt)}${each.cached ? `, ${count(each.cached)} cached` : ""}` : "";
		const cells = [
			each.state, each.lane + (each.awaits === "answer" ? ", whole answer" : ""), prompt, isMine ? count(each.out) : "",
			isMine && each.out ? each.per_s.toFixed(1) : "", isMine ? duration(each.age_s * 1000) : "", each.waits ?? "",
		];
		cells.forEach((text, i) => {
			const cell = row.cells[i + 2];
			if (cell.textContent !== text) cell.textContent = text;
		});
	}
	for (const [key, row] of rows) if (!present.has(key)) { row.remove(); rows.delete(key); }
}

function addRow(key, { request: number, app, model: name }) {
	const row = el("tr", COLUMNS.map(() => el("td")));
	const mark = el("i.dot");
	if (number) {
		row.cells[0].append(button(number, () => explain(number), { "aria-label": `Explain request ${number}` }));
		mark.style.background = colourOf(app ?? "-");
	}
	row.cells[1].append(mark, app ?? "-", daemon.models.length > 1 && name ? `, ${name}` : "");
	rows.set(key, row);
	$("requests").tBodies[0].append(row);
	return row;
}

function showMemory() {
	if (!latest.cells) return; // for operators only
	const [used, reserved, total] = latest.cells, share = (n) => `${total ? (100 * n) / total : 0}%`;
	const bar = el("div.meter.cells", { role: "img", "aria-label": `${count(used)} of ${count(total)} cells used` }, el("i"), el("b"));
	bar.children[0].style.width = share(used);
	bar.children[1].style.width = share(Math.max(0, reserved - used));
	const facts = [["KV cells", `${count(used)} used, ${count(reserved)} reserved of ${count(total)}`]];
	if (latest.prefixes) {
		const [leaves, tokens, pages, size] = latest.prefixes;
		facts.push(["Prefixes in the cache", `${count(leaves)}, ${count(tokens)} tokens`], ["Saved pages", `${count(pages)}, ${bytes(size)}`]);
	}
	$("memory-bar").replaceChildren(bar);
	$("memory").replaceChildren(...facts.flatMap(([name, text]) => [el("dt", name), el("dd", text)]));
}

function showModels() {
	$("models").replaceChildren(...daemon.models.map((each) => el("li",
		each.isChat ? button(each.id, () => watchModel(each.id), { "aria-pressed": String(each.id === (model || hello?.model)), title: "Show its ticks" }) : el("b", each.id),
		` ${each.isChat ? "" : "vectors or scores, "}${each.state}`, el("div.hint", each.status?.detail ?? sizeOf(each)))));
}

let refreshing = 0;
async function explain(number) {
	clearTimeout(refreshing);
	const dialog = $("story");
	try {
		const { requests: [story], told: [head, ...rest] } = await (await request(`/explain?request=${number}`)).json();
		$("story-title").textContent = `Request ${number}${story.app ? `, ${story.app}` : ""}`;
		$("story-body").replaceChildren(el("p", head), el("ul", rest.map((text) => el("li", text))));
		if (!story.reason) refreshing = setTimeout(() => { if (dialog.open) explain(number); }, 1000);
	} catch (error) {
		$("story-title").textContent = `Request ${number}`;
		$("story-body").replaceChildren(el("p", error instanceof Refused ? `${error.message}.` : "The daemon does not answer."));
	}
	if (!dialog.open) { dialog.showModal(); $("story-title").focus(); }
}
