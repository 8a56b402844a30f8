// Conversations as trees of messages, and their storage, which all tabs of a browser share. No DOM in here.
//
// A conversation and each message name the child that is shown below them (`chosen`). A retry or an edit adds a sibling and chooses it, so
// nothing is ever lost: the other versions stay, with everything that was said below them.

const PREFIX = "uma.talk.", LAST_OPENED = "uma.talk";
const SAVE_MS = 300;

export const newId = () => crypto.randomUUID?.() ?? String(Math.random()); // randomUUID: on https and localhost only

export const path = (conversation) => {
	const byId = new Map(conversation.messages.map((message) => [message.id, message]));
	const shown = [];
	for (let message = byId.get(conversation.chosen); message; message = byId.get(message.chosen)) shown.push(message);
	return shown;
};

const parentOf = (conversation, message) => conversation.messages.find(({ id }) => id === message.parent) ?? conversation;

/** The versions of a message, itself among them: answers to the same message, or edits of it. */
export const versionsOf = (conversation, message) => conversation.messages.filter(({ parent }) => parent === message.parent);

export function choose(conversation, message) { parentOf(conversation, message).chosen = message.id; }

/** Add a message below `parent` (null: at the beginning), and show it. */
export function append(conversation, parent, fields) {
	const message = { id: newId(), parent: parent?.id ?? null, chosen: null, revision: 0, ...fields };
	conversation.messages.push(message);
	choose(conversation, message);
	return message;
}

const string = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : 0);
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function parseMessage(raw) {
	if (!isObject(raw) || !["user", "assistant"].includes(raw.role)) return null;
	const files = Array.isArray(raw.files) ? raw.files.filter(isObject).map((file) => ({ name: string(file.name), text: string(file.text) })) : [];
	const calls = Array.isArray(raw.calls) ? raw.calls.filter(isObject).map((call) => ({ name: string(call.name), arguments: string(call.arguments) })) : [];
	return {
		id: string(raw.id), parent: raw.parent ?? null, chosen: raw.chosen ?? null, revision: number(raw.revision),
		role: raw.role, content: string(raw.content), reasoning: string(raw.reasoning), files, calls, model: string(raw.model),
		error: string(raw.error), partial: Boolean(raw.partial ?? raw.cut), stats: isObject(raw.stats) ? raw.stats : undefined,
	};
}

/** Return a stored or imported conversation, or null if it is none. Earlier pages stored a list of `turns` instead of a tree. */
export function parseConversation(raw) {
	if (!isObject(raw)) return null;
	let list = raw.messages;
	if (Array.isArray(raw.turns)) {
		list = raw.turns.map((turn, i) => ({ ...turn, id: `turn-${i}`, parent: i ? `turn-${i - 1}` : null, chosen: `turn-${i + 1}` }));
	}
	if (!Array.isArray(list)) return null;
	const conversation = {
		id: string(raw.id) || newId(), title: string(raw.title), model: string(raw.model), at: number(raw.at), revision: number(raw.revision),
		settings: Object.fromEntries(Object.entries(raw.settings ?? raw.said ?? {}).filter(([, value]) => typeof value === "string")),
		chosen: raw.chosen ?? null, messages: [],
	};
	const byId = new Map();
	for (const message of list.map(parseMessage)) {
		// Parents come first, so there is no circle.
		if (!message?.id || byId.has(message.id) || (message.parent !== null && !byId.has(message.parent))) continue;
		byId.set(message.id, message);
		conversation.messages.push(message);
	}
	for (const node of [conversation, ...conversation.messages]) {
		const children = conversation.messages.filter(({ parent }) => parent === (node === conversation ? null : node.id));
		if (!children.some(({ id }) => id === node.chosen)) node.chosen = children.at(-1)?.id ?? null;
	}
	return conversation;
}

/** Take the messages and the newer values of `theirs` into `mine`; return the messages that changed, or null if nothing did. */
export function merge(mine, theirs) {
	const changed = [];
	const isNewer = theirs.revision > mine.revision;
	if (isNewer) for (const key of ["title", "model", "settings", "at", "revision"]) mine[key] = theirs[key];
	for (const message of theirs.messages) {
		const own = mine.messages.find(({ id }) => id === message.id);
		if (!own) mine.messages.push(message);
		else if (message.revision > own.revision) Object.assign(own, message, { chosen: own.chosen });
		else continue;
		changed.push(message);
	}
	// What is shown here stays; where nothing was below a message, what came is shown.
	mine.chosen ??= theirs.chosen;
	for (const message of mine.messages) message.chosen ??= theirs.messages.find(({ id }) => id === message.id)?.chosen ?? null;
	return isNewer || changed.length ? changed : null;
}

/** The text of a conversation in which a search looks, in lower case. */
const searchable = (conversation) => conversation.messages.flatMap(({ content, files }) => [content, ...(files ?? []).map(({ name }) => name)]);

/** Return the conversations that contain a text, each with the place: {conversation, excerpt}. */
export function search(conversations, text) {
	const wanted = text.trim().toLowerCase();
	const found = [];
	for (const conversation of conversations) {
		let excerpt = "";
		const isInTitle = conversation.title.toLowerCase().includes(wanted);
		if (wanted && !isInTitle) {
			const content = searchable(conversation).find((part) => part.toLowerCase().includes(wanted));
			if (content === undefined) continue;
			const at = content.toLowerCase().indexOf(wanted);
			excerpt = `${at > 20 ? "…" : ""}${content.slice(Math.max(0, at - 20), at + wanted.length + 60)}`;
		}
		found.push({ conversation, excerpt });
	}
	return found;
}

/**
 * The conversations of this browser, each stored by itself. A tab writes only what changed in it, merged with what the others wrote since,
 * and takes in what they write. Dispatches "open" (another conversation is current), "change" (detail: a conversation, and its messages that
 * another tab wrote), "remove" (detail: conversation) and "save" (`isFull`: there was no room).
 */
export class Store extends EventTarget {
	conversations = [];
	current = null;
	isFull = false;
	#storage;
	#session;
	#unsaved = new Set();
	#stored = new Set(); // ids that were in storage: one that is missing there was deleted by another tab
	#removed = new WeakSet(); // conversations that an answer may still be written to
	#timer = 0;

	constructor(storage, session) {
		super();
		this.#storage = storage;
		this.#session = session;
	}

	load() {
		let last;
		try {
			last = this.#session.getItem(LAST_OPENED) ?? this.#storage.getItem(LAST_OPENED);
			this.catchUp();
			this.#loadFirstFormat();
		} catch { /* the browser stores nothing for this page */ }
		this.current = this.conversations.find(({ id }) => id === last) ?? this.conversations[0] ?? this.fresh();
	}

	// All conversations were one item once.
	#loadFirstFormat() {
		const list = JSON.parse(this.#storage.getItem("uma.talks"));
		if (!list) return;
		this.import(list.map((raw, i) => ({ at: list.length - i, ...raw })));
		this.flush();
		this.#storage.removeItem("uma.talks");
	}

	/** Return an empty conversation, which is stored when something is said in it. */
	fresh() {
		const { model = "", settings = {} } = this.current ?? {};
		return { id: newId(), title: "", model, at: Date.now(), revision: 0, settings: { ...settings }, chosen: null, messages: [] };
	}

	/** Note that a conversation (and a message in it) was changed here, and save it soon. */
	touch(conversation, message) {
		if (this.#removed.has(conversation)) return;
		(message ?? conversation).revision++;
		if (!this.conversations.includes(conversation)) this.#add(conversation);
		this.#unsaved.add(conversation);
		clearTimeout(this.#timer);
		this.#timer = setTimeout(() => this.flush(), SAVE_MS);
	}

	open(conversation) {
		this.current = conversation;
		this.#saveLastOpened();
		this.dispatchEvent(new Event("open"));
	}

	#saveLastOpened() {
		try {
			for (const storage of [this.#storage, this.#session]) storage.setItem(LAST_OPENED, this.current?.id ?? "");
		} catch { /* the next visit begins with the newest */ }
	}

	#add(conversation) {
		this.conversations.push(conversation);
		this.#sort();
	}

	#sort() { this.conversations.sort((a, b) => b.at - a.at); }

	/** Write what changed. */
	flush() {
		clearTimeout(this.#timer);
		try {
			for (const conversation of this.#unsaved) {
				const { id } = conversation, theirs = this.#read(id);
				if (theirs) this.#merge(conversation, theirs);
				else if (this.#stored.has(id) && this.#storage.getItem(PREFIX + id) === null) {
					this.#forget(conversation);
					continue;
				}
				this.#storage.setItem(PREFIX + id, JSON.stringify(conversation));
				this.#stored.add(id);
				this.#unsaved.delete(conversation);
			}
			this.isFull = false;
		} catch {
			this.isFull = true;
		}
		this.dispatchEvent(new Event("save"));
		this.#saveLastOpened();
	}

	#read(id) {
		try {
			const found = parseConversation(JSON.parse(this.#storage.getItem(PREFIX + id)));
			return found && { ...found, id };
		} catch {
			return null;
		}
	}

	#merge(conversation, theirs) {
		const messages = merge(conversation, theirs);
		this.#sort();
		if (messages) this.#dispatch("change", { conversation, messages });
	}

	#dispatch(name, detail) { this.dispatchEvent(new CustomEvent(name, { detail })); }

	/** Take in what all tabs have stored, also while this one was asleep. */
	catchUp() {
		const ids = new Set(Object.keys(this.#storage).filter((key) => key.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length)));
		for (const conversation of [...this.conversations]) {
			if (!ids.has(conversation.id) && this.#stored.has(conversation.id)) this.#forget(conversation);
		}
		for (const id of ids) this.#adopt(id);
	}

	#adopt(id) {
		const theirs = this.#read(id);
		if (!theirs) return;
		this.#stored.add(id);
		const mine = this.conversations.find((conversation) => conversation.id === id);
		if (mine) this.#merge(mine, theirs);
		else {
			this.#add(theirs);
			this.#dispatch("change", { conversation: theirs, messages: [] });
		}
	}

	/** Handle an event of the window: another tab has written or deleted something. */
	onStorage({ key, newValue }) {
		if (key === null) this.catchUp();
		else if (key.startsWith(PREFIX)) {
			const id = key.slice(PREFIX.length);
			const mine = this.conversations.find((conversation) => conversation.id === id);
			if (newValue !== null) this.#adopt(id);
			else if (mine) this.#forget(mine);
		}
	}

	#forget(conversation) {
		this.conversations = this.conversations.filter((other) => other !== conversation);
		this.#unsaved.delete(conversation);
		this.#stored.delete(conversation.id);
		this.#removed.add(conversation);
		this.#dispatch("remove", { conversation });
		if (conversation === this.current) this.open(this.conversations[0] ?? this.fresh());
	}

	remove(...conversations) {
		for (const conversation of conversations) {
			this.#forget(conversation);
			try { this.#storage.removeItem(PREFIX + conversation.id); } catch { /* nothing is stored */ }
		}
	}

	/** Add conversations of an export, merged with those that are here; return how many there were. */
	import(list) {
		const found = (Array.isArray(list) ? list : [list]).map(parseConversation).filter(Boolean);
		for (const theirs of found) {
			const mine = this.conversations.find(({ id }) => id === theirs.id);
			if (mine) this.#merge(mine, theirs); else this.#add(theirs);
			this.#unsaved.add(mine ?? theirs);
		}
		this.flush();
		return found.length;
	}

	export() { return JSON.stringify(this.conversations, null, 1); }
}
