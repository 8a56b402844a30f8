// Elements, and numbers as people read them.

export const $ = (id) => document.getElementById(id);
export const on = (target, event, listener) => (typeof target === "string" ? $(target) : target).addEventListener(event, listener);

const ATTRIBUTES = new Set(["role", "for", "scope"]);

/**
 * Make an element from "name.class.class", properties (optional) and children. Properties that start with "on" are listeners; those with a
 * "-" and those of ATTRIBUTES are attributes. Strings become text, so nothing that is passed here is parsed as markup.
 */
export function el(selector, properties, ...children) {
	if (properties instanceof Node || typeof properties !== "object" || Array.isArray(properties)) {
		return el(selector, {}, properties, ...children);
	}
	const [name, ...classes] = selector.split(".");
	const element = document.createElement(name);
	element.classList.add(...classes);
	for (const [key, value] of Object.entries(properties)) {
		if (value === undefined) continue;
		if (key.startsWith("on")) on(element, key.slice(2), value);
		else if (key.includes("-") || ATTRIBUTES.has(key)) element.setAttribute(key, value);
		else element[key] = value;
	}
	for (const child of children.flat()) if (child || child === 0) element.append(child); // one by one: too many for one call's arguments
	return element;
}

export const button = (text, onclick, properties = {}, kind = "quiet") => el(`button.${kind}`, { type: "button", ...properties, onclick }, text);

export const count = (n) => Number(n).toLocaleString("en");
export const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
export const bytes = (n) => (n < 1 << 20 ? `${Math.ceil(n / 1024)} KiB` : n < 1 << 30 ? `${(n / (1 << 20)).toFixed(1)} MiB` : `${(n / (1 << 30)).toFixed(2)} GiB`);
export function duration(ms) {
	if (ms < 1000) return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
	return `${(ms / 1000).toFixed(ms < 1e4 ? 2 : ms < 1e5 ? 1 : 0)} s`;
}

/** Copy a text, and say in the button for a moment whether that was allowed. */
export async function copy(text, button) {
	const label = button.textContent;
	try {
		await navigator.clipboard.writeText(text);
		button.textContent = "Copied";
	} catch {
		button.textContent = "Not allowed here"; // browsers allow it on https and localhost only
	}
	setTimeout(() => { button.textContent = label; }, 1500);
}
