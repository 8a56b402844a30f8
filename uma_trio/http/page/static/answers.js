// The request for an answer, and the stream that fills a message. No DOM in here.

import { daemon, eventsOf, Refused, request } from "./daemon.js";

/** The temperature where neither the person nor the model's configuration names one, as in `run` and `chat`. */
export const TEMPERATURE = 0.7;
const WORDS = new Set(["priority", "reasoning_effort"]); // settings that are no numbers

/** The text that the model gets for a message: its files, each in a fence that its text does not close, and what was written. */
export function textOf({ content, files = [] }) {
	const blocks = files.map(({ name, text }) => {
		const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
		const fence = "`".repeat(longest + 1);
		return `${name}\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
	});
	return [...blocks, content].filter(Boolean).join("\n\n");
}

/** The body of a request for the answer to `messages`. If the last of them is an answer with text, it is continued. */
export function bodyOf({ settings, model }, messages) {
	const { system, ...sampling } = settings;
	const chosen = daemon.models.find(({ id }) => id === model) ?? daemon.models.find(({ isChat }) => isChat);
	const body = {
		model: chosen?.id || model || "default",
		messages: system ? [{ role: "system", content: system }] : [],
		default_temperature: TEMPERATURE,
		stream: true, stream_options: { include_usage: true }, return_progress: true,
	};
	for (const message of messages) {
		const content = textOf(message);
		if (content || message.role === "user") body.messages.push({ role: message.role, content });
	}
	if (body.messages.at(-1)?.role === "assistant") body.continue_final_message = true;
	for (const [name, value] of Object.entries(sampling)) if (value !== "") body[name] = WORDS.has(name) ? value : Number(value);
	return body;
}

/**
 * Fill `message` with the answer to `body`. `changed` is called after each event; `run.wait` is what the answer waits for: {text, value, max}.
 * Throws as `request` does; what has come until then stays in the message.
 */
export async function stream(body, message, run, changed) {
	const response = await request("/v1/chat/completions", { body, signal: run.abort.signal });
	for await (const { data } of eventsOf(response)) {
		if (data === "[DONE]") return;
		take(JSON.parse(data), message, run);
		changed();
	}
	throw new TypeError("the stream ended before the answer");
}

function take(event, message, run) {
	if (event.error) throw new Refused(event.error.message ?? "the answer failed");
	const { delta = {}, finish_reason: reason } = event.choices?.[0] ?? {};
	const { prompt_progress: prompt, load_progress: load, timings } = event;
	if (prompt) run.wait = { text: `Reading the prompt: ${prompt.processed} of ${prompt.total} tokens${prompt.cache ? `, ${prompt.cache} were cached` : ""}`, value: prompt.processed, max: prompt.total };
	if (load) run.wait = { text: load.state, value: load.progress, max: 1 };
	const reasoning = delta.reasoning_content ?? delta.reasoning;
	if (delta.content || reasoning || delta.tool_calls) {
		run.wait = null;
		message.stats.ttft ??= performance.now() - run.startedAt;
	}
	message.content += delta.content ?? "";
	message.reasoning += reasoning ?? "";
	for (const call of delta.tool_calls ?? []) {
		const known = (message.calls[call.index ?? 0] ??= { name: "", arguments: "" });
		known.name += call.function?.name ?? "";
		known.arguments += call.function?.arguments ?? "";
	}
	if (reason) {
		message.stats.reason = reason;
		message.partial = reason === "length";
	}
	if (timings) {
		const { cache_n: cached, prompt_n, predicted_n: tokens, predicted_per_second: rate, queue_ms: queue } = timings;
		Object.assign(message.stats, { cached, prompt: cached + prompt_n, tokens, rate, queue });
	}
}
