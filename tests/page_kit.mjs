// Tabs of one browser in Node: the page's conversations on a storage that they share, and a daemon that answers as a test wants.

globalThis.location = { pathname: "/ui/" };
globalThis.sessionStorage = { getItem: () => null };
const PAGE = new URL("../uma_trio/http/page/static/", import.meta.url);
const load = (name) => import(new URL(name, PAGE));

export const conversations = await load("conversations.js");
export const answers = await load("answers.js");
export const daemon = await load("daemon.js");

/** One origin's storage, whose changes the other tabs are told of when they are awake. */
export class Origin {
	items = new Map();
	tabs = [];
	most = Infinity; // characters of an item
	storageOf(tab) {
		const changed = (key, newValue) => { for (const other of this.tabs) if (other !== tab) other.missed.push({ key, newValue }); };
		const own = {
			getItem: (key) => this.items.get(key) ?? null,
			setItem: (key, value) => {
				if (value.length > this.most) throw new Error("QuotaExceededError");
				if (this.items.get(key) === value) return;
				this.items.set(key, value);
				changed(key, value);
			},
			removeItem: (key) => { if (this.items.delete(key)) changed(key, null); },
		};
		return new Proxy(own, { ownKeys: () => [...this.items.keys()], getOwnPropertyDescriptor: (_, key) => ({ value: this.items.get(key), enumerable: true, configurable: true }) });
	}
	get stored() { return [...this.items].filter(([key]) => key.startsWith("uma.talk.")).map(([, text]) => JSON.parse(text)); }
	titles() { return this.stored.map(({ title }) => title).sort(); }
}

/** A tab: what the page does with its conversations when a person does something. */
export class Tab {
	missed = [];
	constructor(origin = new Origin(), session = new Map()) {
		this.origin = origin;
		this.session = session;
		origin.tabs.push(this);
		this.store = new conversations.Store(origin.storageOf(this), { getItem: (key) => session.get(key) ?? null, setItem: (key, value) => session.set(key, value) });
		this.store.load();
	}
	get titles() { return this.store.conversations.map(({ title }) => title).sort(); }
	find(title) { return this.store.conversations.find((conversation) => conversation.title === title); }
	/** Begin a conversation. */
	begin(title) {
		const conversation = this.store.fresh();
		conversation.title = title;
		this.say(title, conversation);
		this.store.open(conversation);
		return conversation;
	}
	/** Say something below the last message, and have it answered. */
	say(content, conversation = this.store.current, parent = conversations.path(conversation).at(-1) ?? null) {
		const question = conversations.append(conversation, parent, { role: "user", content });
		conversation.at = Date.now();
		const answer = conversations.append(conversation, question, { role: "assistant", content: `re ${content}` });
		this.store.touch(conversation);
		return answer;
	}
	shown(conversation = this.store.current) { return conversations.path(conversation).map(({ content }) => content).join(" "); }
	save() { this.store.flush(); }
	/** Hear of what other tabs have stored since. */
	wake() { for (const event of this.missed.splice(0)) this.store.onStorage(event); }
	close() {
		this.save();
		this.origin.tabs = this.origin.tabs.filter((other) => other !== this);
	}
}

/** The response of a daemon that streams these events. */
export function streamed(...events) {
	const text = events.map((event) => `data: ${event === "[DONE]" ? event : JSON.stringify(event)}\n\n`).join("");
	return new Response(text, { headers: { "Content-Type": "text/event-stream" } });
}
