// The picture of ticks: a column for each, as high as its time, in the colours of the programs that had a part.

import { el } from "./dom.js";

const COLOURS = ["#3a8f95", "#cf7a33", "#7b68bd", "#8d9b2f", "#c2577a", "#4a7fc4", "#a8803f", "#55996a"];
const WIDTH = 7, LEFT = 56; // pixels: of a column, and of the scale
export const MOST_TICKS = 600; // ticks that are kept

/** The colour of a program, always the same. */
export function colourOf(app) {
	const { known } = colourOf;
	if (!known.has(app)) known.set(app, COLOURS[known.size % COLOURS.length]);
	return known.get(app);
}
colourOf.known = new Map();

/** The tick below the pointer. */
export function pick(ticks, { target, clientX }) {
	return ticks[ticks.length - Math.ceil((target.getBoundingClientRect().right - clientX) / WIDTH)];
}

/** The tick that an arrow key leads to from the selected one. */
export function pickNext(ticks, selected, key) {
	const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
	if (!step || !ticks.length) return undefined;
	const at = ticks.findIndex(({ n }) => n === selected);
	return ticks[Math.max(0, Math.min(ticks.length - 1, (at < 0 ? ticks.length : at) + step))];
}

export function draw(canvas, ticks, selected) {
	const scale = devicePixelRatio || 1, { clientWidth: width, clientHeight: height } = canvas;
	if (!width) return;
	if (canvas.width !== Math.round(width * scale)) { canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale); }
	const context = canvas.getContext("2d"), style = getComputedStyle(canvas);
	context.setTransform(scale, 0, 0, scale, 0, 0);
	context.clearRect(0, 0, width, height);
	const shown = ticks.slice(-Math.floor((width - LEFT) / WIDTH));
	const top = topOf(shown);
	const y = (ms) => height - 6 - (Math.min(ms, top) / (top * 1.06)) * (height - 14);
	const x = (i) => width - (shown.length - i) * WIDTH;
	drawScale(context, style, width, top, y);
	shown.forEach((tick, i) => drawTick(context, style, tick, x(i), y, tick.n === selected));
	const readers = new Map(shown.flatMap((tick) => tick.parts.filter(({ key }) => tick.gaps.has(key)).map(({ key, app }) => [key, app])));
	for (const [key, app] of readers) drawLine(context, shown, (tick) => tick.gaps.get(key), x, y, colourOf(app), []);
	drawLine(context, shown, (tick) => tick.step || null, x, y, style.caretColor, [5, 4]);
}

/** The time at the upper edge. One tick in thirty may stand out, so that the others can be told apart. */
function topOf(ticks) {
	const heights = ticks.map((tick) => Math.max(tick.took, ...tick.gaps.values())).sort((a, b) => a - b);
	return Math.max(4, 1.4 * (heights[Math.floor(0.97 * heights.length)] ?? 0), 1.4 * (ticks.at(-1)?.step ?? 0));
}

function drawScale(context, style, width, top, y) {
	const unit = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5].find((each) => top / each <= 5) ?? 1e6;
	context.font = `11px ${style.fontFamily}`;
	context.textBaseline = "middle";
	context.textAlign = "right";
	for (let ms = 0; ms <= top; ms += unit) {
		context.fillStyle = style.borderTopColor;
		context.fillRect(LEFT - 4, y(ms) - 0.5, width - LEFT + 4, 1);
		context.fillStyle = style.color;
		context.fillText(ms ? `${ms} ms` : "0", LEFT - 8, y(ms));
	}
}

function drawTick(context, style, tick, x, y, isSelected) {
	const tokens = tick.parts.reduce((sum, part) => sum + part.tokens, 0) + tick.ballast;
	const height = y(0) - y(tick.took), share = tick.others ? (tokens ? 0.75 : 0) : 1;
	const patterns = patternsOf(context, style.backgroundColor);
	let at = y(0);
	const bar = (n, colour, pattern) => {
		const part = tokens ? (height * share * n) / tokens : 0;
		at -= part;
		for (const fill of [colour, pattern].filter(Boolean)) {
			context.fillStyle = fill;
			context.fillRect(x, at, WIDTH - 1.5, part);
		}
	};
	for (const { tokens: n, drafts, isPrompt, app } of tick.parts) {
		bar(n - drafts, colourOf(app), isPrompt && patterns.prompt);
		if (drafts) bar(drafts, colourOf(app), patterns.drafts);
	}
	if (tick.ballast) bar(tick.ballast, style.borderTopColor, patterns.drafts);
	if (tick.others) {
		context.fillStyle = style.outlineColor;
		context.fillRect(x, at - height * (1 - share), WIDTH - 1.5, height * (1 - share));
	}
	if (isSelected) {
		context.strokeStyle = style.caretColor;
		context.lineWidth = 2;
		context.strokeRect(x - 1, y(tick.took) - 1, WIDTH + 0.5, height + 1);
	}
}

/** Draw a value of each tick as a line: undefined is passed over, null ends the line. */
function drawLine(context, ticks, valueOf, x, y, colour, dash) {
	context.setLineDash(dash);
	context.strokeStyle = colour;
	context.lineWidth = 1.5;
	context.beginPath();
	let isDown = false;
	ticks.forEach((tick, i) => {
		const ms = valueOf(tick);
		if (ms === undefined) return;
		if (ms !== null) context[isDown ? "lineTo" : "moveTo"](x(i) + 3, y(ms));
		isDown = ms !== null;
	});
	context.stroke();
	context.setLineDash([]);
}

const patterns = new Map(); // background: {prompt, drafts}
function patternsOf(context, colour) {
	const make = (size, paint) => {
		const tile = el("canvas", { width: size, height: size }), inner = tile.getContext("2d");
		inner.strokeStyle = inner.fillStyle = colour;
		paint(inner);
		return context.createPattern(tile, "repeat");
	};
	if (!patterns.has(colour)) patterns.set(colour, {
		prompt: make(5, (c) => { c.lineWidth = 1.4; c.beginPath(); for (const d of [-5, 0, 5]) { c.moveTo(d, 5); c.lineTo(d + 5, 0); } c.stroke(); }),
		drafts: make(3, (c) => c.fillRect(0, 0, 1.6, 1.6)),
	});
	return patterns.get(colour);
}
