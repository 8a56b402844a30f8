// The session of client_session.py as clients for Node play it: node client_session.mjs CLIENT BASE_URL [--stream]
// Packages are found from the working directory.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { pathToFileURL } from "node:url";

const [client, url, ...flags] = process.argv.slice(2), stream = flags.includes("--stream");
const find = createRequire(process.cwd() + "/");
const load = (name) => import(pathToFileURL(find.resolve(name)));
const QUESTIONS = ["What is in the cup, and what does it weigh?", "Is that heavy?"];
const heard = { calls: [], texts: [], verdict: null };
const look = ({ thing }) => { heard.calls.push(["look", { thing }]); return `${thing} is full`; };
const weigh = ({ thing, unit = null }) => { heard.calls.push(["weigh", { thing, unit }]); return `${thing}: 300 ${unit ?? "grams"}`; };
const run = { look, weigh };
const FORM = { type: "object", properties: { heavy: { type: "boolean" }, grams: { type: "integer" } }, required: ["heavy", "grams"], additionalProperties: false };
const parameters = (properties) => ({ type: "object", properties, required: Object.keys(properties) });
const TOOLS = [
	{ type: "function", function: { name: "look", description: "Look at a thing.", parameters: parameters({ thing: { type: "string" } }) } },
	{ type: "function", function: { name: "weigh", description: "Weigh a thing.", parameters: parameters({ thing: { type: "string" }, unit: { type: ["string", "null"] } }) } },
];

/** Play the session with `ask`, which returns the message to messages, with tools or with a form. */
async function converse(ask, resultOf) {
	const messages = [];
	for (const question of QUESTIONS) {
		messages.push({ role: "user", content: question });
		for (;;) {
			const isLast = question === QUESTIONS[1] && messages.at(-1).role === "tool";
			const said = await ask(messages, isLast ? { form: FORM } : { tools: TOOLS });
			messages.push(said);
			if (!said.tool_calls?.length) { heard.texts.push(said.content); break; }
			for (const call of said.tool_calls) messages.push(resultOf(call));
		}
	}
	heard.verdict = JSON.parse(heard.texts.pop());
}

const CLIENTS = {
	async "openai-node"() {
		const { default: OpenAI } = await load("openai");
		const { chat } = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
		await converse(async (messages, { tools, form }) => {
			const body = { model: "any", messages, ...(tools ? { tools } : { response_format: { type: "json_schema", json_schema: { name: "verdict", schema: form } } }) };
			if (stream) return (await chat.completions.stream(body).finalChatCompletion()).choices[0].message;
			return (await chat.completions.create(body)).choices[0].message;
		}, (call) => ({ role: "tool", tool_call_id: call.id, content: run[call.function.name](JSON.parse(call.function.arguments)) }));
		return "openai";
	},
	async "ollama-node"() {
		const { Ollama } = await load("ollama");
		const ollama = new Ollama({ host: url });
		await converse(async (messages, { tools, form }) => {
			const body = { model: "any", messages, ...(tools ? { tools } : { format: form }) };
			if (!stream) return (await ollama.chat(body)).message;
			const said = { role: "assistant", content: "", thinking: "", tool_calls: [] };
			for await (const { message } of await ollama.chat({ ...body, stream: true })) {
				said.content += message.content ?? "";
				said.thinking += message.thinking ?? "";
				said.tool_calls.push(...(message.tool_calls ?? []));
			}
			return said;
		}, ({ function: { name, arguments: given } }) => ({ role: "tool", tool_name: name, content: run[name](given) }));
		return "ollama";
	},
	async "ai-node"() {
		const { generateText, streamText, tool, stepCountIs, Output, jsonSchema } = await load("ai");
		const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
		const model = createOpenAICompatible({ name: "local", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true })("any");
		const tools = Object.fromEntries(TOOLS.map(({ function: { name, description, parameters } }) => [name, tool({ description, inputSchema: jsonSchema(parameters), execute: async (given) => run[name](given) })]));
		const messages = [];
		const ask = async (question, more) => {
			messages.push({ role: "user", content: question });
			const asked = { model, messages, tools, maxRetries: 0, stopWhen: stepCountIs(4), onError() {}, ...more };
			if (!stream) return await generateText(asked);
			const made = streamText(asked);
			for await (const part of made.fullStream) if (part.type === "error") throw part.error;
			return { text: await made.text, output: more ? await made.output : undefined, response: await made.response };
		};
		const first = await ask(QUESTIONS[0]);
		heard.texts.push(first.text);
		messages.push(...first.response.messages);
		heard.verdict = (await ask(QUESTIONS[1], { output: Output.object({ schema: jsonSchema(FORM) }) })).output;
		return "ai";
	},
};

const name = await CLIENTS[client]();
let folder = dirname(find.resolve(name)), about = {};
while (about.name !== name) { try { about = JSON.parse(readFileSync(join(folder, "package.json"), "utf8")); } catch { /* above */ } folder = dirname(folder); }
console.log("\n" + JSON.stringify({ ...heard, version: about.version }));
process.exit();
