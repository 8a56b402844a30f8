// Requests to the daemon, its models, and whether it answers.

const BASE = location.pathname.replace(/(\/v1)?\/ui\/.*$/, "");
const LOOK_MS = 5000, RETRY_MS = 2000;

/** The daemon answered with an error; the message is the daemon's. */
export class Refused extends Error {}

/** Dispatches "models", "presence" and "key" (a key is needed, or was forgotten). */
export const daemon = Object.assign(new EventTarget(), { models: [], isThere: true, isKeyWrong: false });
const dispatch = (name) => daemon.dispatchEvent(new Event(name));

const KEY = "uma.key";
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));
export function setKey(key) {
	if (key) sessionStorage.setItem(KEY, key); else sessionStorage.removeItem(KEY);
}

/** Send a request; throw Refused with the daemon's message, or TypeError if no daemon answers. */
export async function request(path, { body, signal, headers = {} } = {}) {
	const key = sessionStorage.getItem(KEY);
	const response = await fetch(BASE + path, {
		method: body ? "POST" : "GET",
		headers: {
			"X-UMA-App": "uma-trio page",
			...(key && { Authorization: `Bearer ${key}` }),
			...(body && { "Content-Type": "application/json" }),
			...headers,
		},
		body: body && JSON.stringify(body),
		signal,
		cache: "no-store",
	});
	if (response.ok) return response;
	if (response.status === 401) {
		daemon.isKeyWrong = hasKey();
		dispatch("key");
	}
	const error = await response.json().catch(() => null);
	if (!error && response.status >= 500) throw new TypeError("a proxy answers, and the daemon behind it does not");
	throw new Refused(error?.error?.message ?? error?.message ?? `HTTP ${response.status}`);
}

/** Yield the server-sent events of a response: {data, id}. */
export async function* eventsOf(response) {
	const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
	let rest = "";
	try {
		for (;;) {
			const { value, done } = await reader.read();
			if (done) return;
			const blocks = (rest + value).split("\n\n");
			rest = blocks.pop();
			for (const block of blocks) {
				const data = /^data: (.*)$/m.exec(block)?.[1];
				if (data) yield { data, id: /^id: (.*)$/m.exec(block)?.[1] };
			}
		}
	} finally {
		reader.cancel().catch(() => {});
	}
}

export function setPresence(isThere) {
	daemon.isThere = isThere;
	dispatch("presence");
}

/** Fetch the list of models. Those that write text can be talked to; the others make vectors or scores. */
export async function fetchModels() {
	const { data = [] } = await (await request("/v1/models")).json();
	daemon.models = data.map((model) => ({
		...model,
		state: model.status?.value ?? "loaded",
		isChat: (model.capabilities ?? ["completion"]).includes("completion"),
	}));
	setPresence(true);
	dispatch("models");
}

let wake = () => {};
/** Look at the daemon now instead of at the end of the pause. */
export const lookNow = () => wake();

/** Keep looking whether the daemon answers and what its models do, while the page is visible. */
export async function keepLooking() {
	for (;;) {
		let pause = LOOK_MS;
		if (!document.hidden) {
			try {
				const isSettled = daemon.models.length && daemon.models.every((model) => model.state !== "loading");
				if (daemon.isThere && isSettled) await request("/health"); else await fetchModels();
				setPresence(true);
			} catch (error) {
				setPresence(error instanceof Refused);
				pause = RETRY_MS;
			}
		}
		await new Promise((resolve) => { wake = resolve; setTimeout(resolve, pause); });
	}
}
