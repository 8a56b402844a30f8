// The page of uma-trio: a chat, and what the daemon computes. Texts of models, programs and people become text nodes (dom.js) or go
// through DOMPurify (markdown.js).

import { drawTicks, startBatch, watch } from "./batch.js";
import { sayNext, startChat, stop } from "./chat.js";
import { startComposer } from "./composer.js";
import { Store } from "./conversations.js";
import { daemon, fetchModels, hasKey, keepLooking, lookNow, setKey } from "./daemon.js";
import { $, on } from "./dom.js";
import { loadFormatter } from "./markdown.js";
import { startSettings } from "./settings.js";
import { startSidebar } from "./sidebar.js";

/** The browser's storage, or one that keeps nothing where the browser allows none. */
function storage(name) {
	try { return window[name]; } catch { return { getItem: () => null, setItem() {}, removeItem() {} }; }
}
const store = new Store(storage("localStorage"), storage("sessionStorage"));

// --- what is said above all views ---

const FULL = "The browser has no room for more conversations: export them, and delete some.";
const GONE = "The daemon does not answer. This page tries again every two seconds.";
function showPresence() {
	const text = daemon.isThere ? (store.isFull ? FULL : "") : GONE;
	$("notice").textContent = text;
	$("notice").hidden = !text;
	$("state").className = `state ${daemon.isThere ? "on" : "off"}`;
	$("state").textContent = daemon.isThere ? "connected" : "no daemon";
}

// --- views ---

function route() {
	const isBatch = location.hash === "#/batch";
	$("chat").hidden = $("menu").hidden = isBatch;
	$("batch").hidden = !isBatch;
	$("to-chat").ariaCurrent = isBatch ? null : "page";
	$("to-batch").ariaCurrent = isBatch ? "page" : null;
	document.title = isBatch ? "Batch · uma-trio" : "uma-trio";
	watch();
}

// --- theme ---

const THEMES = ["system", "light", "dark"];
function showTheme(theme) {
	document.documentElement.dataset.theme = theme;
	$("theme").title = $("theme").ariaLabel = `Theme: ${theme}`;
	$("theme").textContent = { system: "◐", light: "☀", dark: "☾" }[theme];
	drawTicks();
}
function nextTheme() {
	const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
	try { localStorage.setItem("uma.theme", theme); } catch { /* for this visit only */ }
	showTheme(theme);
}

// --- key of the daemon ---

function askForKey() {
	if (daemon.isKeyWrong) $("key-said").textContent = "The daemon does not know that key. Try another one.";
	if (!$("key-dialog").open) $("key-dialog").showModal();
}

// --- keys of the keyboard ---

let firstKey = "";
const go = (view) => { location.hash = `#/${view}`; route(); };
const KEYS = {
	gc: () => go("chat"), gb: () => go("batch"), "?": () => $("show-keys").click(), p: () => { if (!$("batch").hidden) $("pause").click(); },
	"/": () => { go("chat"); $("say").focus(); }, n: () => { go("chat"); $("new-chat").click(); $("say").focus(); },
	f: () => { go("chat"); if (!$("menu").hidden && $("menu").checkVisibility()) $("menu").click(); $("search").focus(); },
};
function onKey(event) {
	const isInDialog = document.querySelector("dialog[open]");
	if (event.key === "Escape" && !isInDialog) return stop();
	if (event.ctrlKey || event.metaKey || event.altKey || isInDialog || event.target.closest("input, textarea, select")) return;
	const key = event.key.toLowerCase();
	const act = KEYS[firstKey + key] ?? KEYS[key];
	firstKey = key === "g" ? "g" : "";
	if (act) { event.preventDefault(); act(); }
}

function start() {
	startChat(store);
	startSidebar(store);
	startSettings(store);
	startComposer(sayNext);
	startBatch();
	store.load();
	store.open(store.current);

	daemon.addEventListener("presence", showPresence);
	daemon.addEventListener("key", askForKey);
	store.addEventListener("save", showPresence);
	on(window, "storage", (event) => store.onStorage(event));
	on(window, "pagehide", () => store.flush());
	on(window, "pageshow", (event) => { if (event.persisted) store.catchUp(); });
	on(document, "visibilitychange", () => { if (document.hidden) store.flush(); lookNow(); watch(); });
	on(window, "hashchange", route);
	on(window, "keydown", onKey);

	on("stop", "click", () => stop());
	on("theme", "click", nextTheme);
	on("key-form", "submit", () => { setKey($("key").value.trim()); $("key").value = ""; fetchModels().catch(() => {}); });
	on("forget-key", "click", () => { setKey(""); location.reload(); });
	on("show-keys", "click", () => { $("forget-key").hidden = !hasKey(); $("keys").showModal(); });
	for (const button of document.querySelectorAll("[data-close]")) on(button, "click", () => button.closest("dialog").close());

	showTheme(document.documentElement.dataset.theme ?? "system");
	route();
	if (!$("chat").hidden && matchMedia("(min-width: 761px)").matches) $("say").focus(); // a keyboard on a screen covers it
	keepLooking();
	requestAnimationFrame(() => setTimeout(loadFormatter)); // after the first paint
}

start();
