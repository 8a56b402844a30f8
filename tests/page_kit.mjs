// The page's script without a browser: tabs of one origin in Node, on the few parts of the DOM that it uses.
import { readFileSync } from "node:fs";
import vm from "node:vm";

const source = readFileSync(new URL("../uma_trio/http/page/app.js", import.meta.url), "utf8");
const SEEN = "talks blocksOf block markdown load fresh say saveNow drop go answer bodyOf watch ask".split(" ");

class Node {}

/** An element that keeps its children, properties and listeners; whatever else is asked of it does nothing. */
class Element extends Node {
	constructor(name, document) {
		super();
		Object.assign(this, { name, document, childNodes: [], attributes: {}, listeners: {}, value: "", hidden: false, style: {}, parent: null, isConnected: true, classes: new Set() });
		this.classList = { add: (...all) => all.forEach((one) => this.classes.add(one)), remove: (...all) => all.forEach((one) => this.classes.delete(one)), toggle: () => false };
	}
	get childNodes() { return this.nodes; }
	set childNodes(nodes) { this.nodes = nodes; this.children = nodes.filter((one) => one instanceof Element); }
	get firstChild() { return this.childNodes[0]; }
	get lastChild() { return this.childNodes.at(-1); }
	get lastElementChild() { return this.children.at(-1); }
	set className(text) { this.classes.clear(); this.classList.add(...text.split(" ").filter(Boolean)); }
	get textContent() { return this.childNodes.map((one) => (one instanceof Element ? one.textContent : one)).join(""); }
	set textContent(text) { this.childNodes = [String(text)]; }
	setAttribute(name, value) { this.attributes[name] = String(value); }
	addEventListener(name, act) { (this.listeners[name] ??= []).push(act); }
	fire(name, event = {}) { for (const act of this.listeners[name] ?? []) act({ target: this, preventDefault() {}, ...event }); }
	append(...all) {
		for (const one of all) {
			if (one instanceof Element) { one.parent = this; this.children.push(one); }
			this.nodes.push(one instanceof Element ? one : String(one));
		}
	}
	appendChild(one) { this.append(one); return one; }
	replaceChildren(...all) { this.childNodes = []; this.append(...all); }
	replaceWith(made) { made.parent = this.parent; this.parent.childNodes = this.parent.nodes.map((one) => (one === this ? made : one)); }
	remove() { if (this.parent) this.parent.childNodes = this.parent.nodes.filter((one) => one !== this); }
	/** As far as the page needs it: a class, somewhere below. */
	querySelectorAll(selector) {
		const name = /\.([\w-]+)$/.exec(selector)?.[1], found = [];
		const look = (node) => node.children.forEach((one) => { if (one.classes.has(name)) found.push(one); look(one); });
		look(this);
		return found;
	}
	querySelector(selector) { return this.querySelectorAll(selector)[0] ?? null; }
	getContext() { return null; }
	focus() {}
	showModal() { this.open = true; }
	close() { this.open = false; }
	/** The element as text: name(child child). */
	toString() { return `${this.name}(${this.childNodes.join("")})`; }
}

/** One origin's storage, whose changes the other tabs are told of when they are awake. */
export class Origin {
	constructor() { this.items = new Map(); this.tabs = []; this.most = Infinity; }
	storageOf(tab) {
		const origin = this;
		const changed = (key, newValue) => { for (const other of origin.tabs) if (other !== tab) other.missed.push({ key, newValue }); };
		const own = {
			getItem: (key) => origin.items.get(key) ?? null,
			setItem: (key, value) => {
				if (value.length > origin.most) throw new Error("QuotaExceededError");
				if (origin.items.get(key) === value) return;
				origin.items.set(key, value);
				changed(key, value);
			},
			removeItem: (key) => { if (origin.items.delete(key)) changed(key, null); },
		};
		return new Proxy(own, { ownKeys: () => [...origin.items.keys()], getOwnPropertyDescriptor: (_, key) => ({ value: origin.items.get(key), enumerable: true, configurable: true }) });
	}
	titles() { return [...this.items].filter(([key]) => key.startsWith("uma.talk.")).map(([, text]) => JSON.parse(text).title).sort(); }
}

/** A tab with the page. `fetch` answers its requests; what it schedules does not run by itself. */
export class Tab {
	constructor(origin = new Origin(), { fetch = () => new Promise(() => {}), session = new Map(), asleep = false } = {}) {
		const elements = new Map();
		const document = new Element("document");
		document.createElement = (name) => new Element(name, document);
		document.getElementById = (id) => elements.get(id) ?? elements.set(id, new Element(id, document)).get(id);
		Object.assign(this, { origin, missed: [], window: new Element("window"), $: document.getElementById, asleep });
		origin.tabs.push(this);
		const sessionStorage = { getItem: (key) => session.get(key) ?? null, setItem: (key, value) => session.set(key, value) };
		const world = {
			document, Node, fetch, sessionStorage, localStorage: origin.storageOf(this), window: this.window, location: { pathname: "/ui/", hash: "" },
			crypto: globalThis.crypto, setTimeout: () => 0, clearTimeout() {}, requestAnimationFrame: () => 1, cancelAnimationFrame() {}, performance, confirm: () => true, innerHeight: 800,
			matchMedia: () => new Element("media"), ResizeObserver: class { observe() {} }, AbortController, TextDecoderStream, console,
		};
		vm.createContext(world);
		const seen = SEEN.map((name) => `get ${name}() { return ${name}; }`).join(", ");
		vm.runInContext(`(() => {${source}\nglobalThis.page = { get talk() { return talk; }, set talk(one) { talk = one; }, ${seen} };})()`, world);
		this.page = world.page;
	}
	/** Be told of what other tabs have stored since. */
	wake() { for (const event of this.missed.splice(0)) this.window.fire("storage", event); }
	close() { this.window.fire("pagehide"); this.origin.tabs = this.origin.tabs.filter((one) => one !== this); }
	/** Begin a conversation, answered or not. */
	begin(title) { const page = this.page; page.talk = page.fresh(); page.say(title); return page.talk; }
}
