// The list of conversations: open, search, rename, delete, export, import.

import { isAnswering } from "./chat.js";
import { search } from "./conversations.js";
import { $, button, el, on, plural } from "./dom.js";

let store = null, renamed = null;

export function startSidebar(theStore) {
	store = theStore;
	for (const name of ["open", "change", "remove", "save"]) store.addEventListener(name, showList);
	on("search", "input", showList);
	on("search", "keydown", (event) => {
		if (event.key === "Enter") $("conversations").querySelector(".open")?.click();
		if (event.key === "Escape" && $("search").value) { event.stopPropagation(); $("search").value = ""; showList(); }
	});
	on("new-chat", "click", () => open(store.fresh()));
	on("export", "click", exportAll);
	on("import", "click", () => $("import-file").click());
	on("import-file", "change", importFile);
	on("delete-all", "click", () => { if (confirm("Delete all conversations in this browser?")) store.remove(...store.conversations); });
	on("menu", "click", () => toggle(!$("side").classList.contains("shown")));
	on("log", "click", () => toggle(false));
	on("side", "keydown", (event) => { if (event.key === "Escape" && $("side").classList.contains("shown")) { event.stopPropagation(); toggle(false); $("menu").focus(); } });
}

function open(conversation) {
	store.open(conversation);
	toggle(false);
	if (matchMedia("(min-width: 761px)").matches) $("say").focus();
}

/** On narrow windows the list lies over the conversation. */
function toggle(isShown) {
	$("side").classList.toggle("shown", isShown);
	$("menu").ariaExpanded = isShown;
}

function showList() {
	if (renamed && $("conversations").querySelector("input")) return; // it would lose what is being typed
	const found = search(store.conversations, $("search").value);
	$("none").hidden = found.length > 0 || !$("search").value;
	$("conversations").replaceChildren(...found.map(({ conversation, excerpt }) => {
		const title = conversation.title || "New conversation", isCurrent = conversation === store.current;
		return el("li", { className: `${isCurrent ? "now" : ""} ${isAnswering(conversation) ? "runs" : ""}` },
			conversation === renamed ? titleField(conversation) : [
				button(title, () => open(conversation), { title, "aria-current": isCurrent ? "true" : undefined }, "open"),
				button("✎", () => { renamed = conversation; showList(); }, { "aria-label": `Rename ${title}`, title: "Rename" }, "rename"),
				button("✕", () => remove(conversation), { "aria-label": `Delete ${title}`, title: "Delete" }, "drop")],
			excerpt && el("div.hint", excerpt));
	}));
	$("conversations").querySelector("input")?.select();
}

function titleField(conversation) {
	const field = el("input", { value: conversation.title, "aria-label": "Title", maxLength: 200 });
	const done = (isKept) => {
		if (renamed !== conversation) return;
		renamed = null;
		const title = field.value.trim();
		if (isKept && title && title !== conversation.title) { conversation.title = title; store.touch(conversation); }
		showList();
	};
	on(field, "blur", () => done(true));
	on(field, "keydown", (event) => {
		if (event.key === "Enter") done(true);
		if (event.key === "Escape") { event.stopPropagation(); done(false); }
	});
	return field;
}

function remove(conversation) {
	if (!conversation.messages.length || confirm(`Delete “${conversation.title}”?`)) store.remove(conversation);
}

function exportAll() {
	const url = URL.createObjectURL(new Blob([store.export()], { type: "application/json" }));
	el("a", { href: url, download: "conversations.json" }).click();
	setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

async function importFile() {
	const [file] = $("import-file").files;
	let text = `${file.name} is no export of conversations.`;
	try {
		const n = store.import(JSON.parse(await file.text()));
		if (n) text = `${plural(n, "conversation")} imported.`;
	} catch { /* no JSON */ }
	$("import-said").textContent = text;
	$("import-file").value = "";
	showList();
}
