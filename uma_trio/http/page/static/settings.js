// The model and the settings of the open conversation.

import { TEMPERATURE } from "./answers.js";
import { daemon } from "./daemon.js";
import { $, bytes, count, el, on } from "./dom.js";

const FIELDS = ["system", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "priority", "reasoning_effort"];
let store = null;

export function startSettings(theStore) {
	store = theStore;
	store.addEventListener("open", showSettings);
	store.addEventListener("change", ({ detail }) => { if (detail.conversation === store.current) showSettings(); });
	daemon.addEventListener("models", showModel);
	for (const name of FIELDS) {
		on(name, "change", () => {
			if (!$(name).reportValidity()) return;
			store.current.settings[name] = $(name).value;
			keep();
		});
	}
	on("model", "change", () => { store.current.model = $("model").value; keep(); showModel(); });
	on("settings", "submit", (event) => event.preventDefault());
	on("show-settings", "click", () => {
		$("settings").hidden = !$("settings").hidden;
		$("show-settings").ariaExpanded = !$("settings").hidden;
	});
}

/** Save the settings of a conversation in which something was said; an empty one is not stored. */
function keep() { if (store.current.messages.length) store.touch(store.current); }

function showSettings() {
	for (const name of FIELDS) if (document.activeElement !== $(name)) $(name).value = store.current.settings[name] ?? "";
	showModel();
}

function showModel() {
	const models = daemon.models.filter(({ isChat }) => isChat);
	const model = models.find(({ id }) => id === store.current.model) ?? models[0];
	const options = models.map(({ id, state }) => ({ value: id, textContent: state === "loaded" ? id : `${id} (${state})`, selected: id === model.id }));
	const state = JSON.stringify(options);
	if ($("model").dataset.state !== state) { // or an open list would close
		$("model").dataset.state = state;
		$("model").replaceChildren(...options.map((properties) => el("option", properties)));
	}
	const size = model?.meta?.n_ctx;
	$("model-state").textContent = {
		loaded: size ? `${count(size)} tokens of context` : "",
		loading: model?.status?.detail ?? "is being loaded",
		failed: "could not be loaded",
		unloaded: "is loaded with the first message",
	}[model?.state] ?? (daemon.models.length ? "no model of this daemon writes text" : "");
	const defaults = model?.defaults ?? {};
	$("temperature").placeholder = `${defaults.temperature ?? TEMPERATURE}`;
	for (const name of ["top_p", "top_k", "min_p"]) $(name).placeholder = `${defaults[name] ?? "off"}`;
}

export const sizeOf = ({ meta = {} }) => [meta.size && bytes(meta.size), meta.n_ctx && `${count(meta.n_ctx)} tokens of context`].filter(Boolean).join(", ");
