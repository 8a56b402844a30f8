// What is being written: text, and text files that are attached by a button, dropped or pasted.

import { $, button, bytes, el, on } from "./dom.js";

const LARGEST_FILE = 1 << 20; // bytes; more than the context of most models, and a fifth of what a browser stores for a page
let files = [];

export function startComposer(send) {
	const submit = () => {
		const text = $("say").value.trim();
		if ((!text && !files.length) || $("send").hidden) return;
		const attached = files;
		$("say").value = "";
		files = [];
		showFiles();
		grow();
		send(text, attached);
	};
	on("composer", "submit", (event) => { event.preventDefault(); submit(); });
	on("say", "keydown", (event) => {
		if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
	});
	on("say", "input", grow);
	on("say", "paste", (event) => {
		if (!event.clipboardData.files.length) return;
		event.preventDefault();
		attach(event.clipboardData.files);
	});
	on("attach", "click", () => $("file").click());
	on("file", "change", async () => { await attach($("file").files); $("file").value = ""; $("say").focus(); });
	const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
	const mark = (isOver) => $("chat").classList.toggle("dropping", isOver);
	on("chat", "dragover", (event) => { if (hasFiles(event)) { event.preventDefault(); mark(true); } });
	on("chat", "dragleave", (event) => { if (!$("chat").contains(event.relatedTarget)) mark(false); });
	on("chat", "drop", (event) => {
		mark(false);
		if (hasFiles(event)) { event.preventDefault(); attach(event.dataTransfer.files); }
	});
}

async function attach(list) {
	const problems = [];
	for (const file of list) {
		try { files.push({ name: file.name, text: await textOf(file) }); } catch (error) { problems.push(error.message); }
	}
	$("file-error").textContent = problems.join(" ");
	showFiles();
}

async function textOf(file) {
	if (file.size > LARGEST_FILE) throw new Error(`${file.name} has ${bytes(file.size)}; a file may have ${bytes(LARGEST_FILE)}.`);
	let text = "\0";
	try { text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()); } catch { /* not UTF-8, or a folder */ }
	if (text.includes("\0")) throw new Error(`${file.name} is no text in UTF-8.`);
	return text;
}

function showFiles() {
	$("files").hidden = !files.length;
	$("files").replaceChildren(...files.map((file) => el("li", el("span", file.name), el("span.hint", bytes(file.text.length)),
		button("✕", () => { files = files.filter((other) => other !== file); showFiles(); $("say").focus(); }, { "aria-label": `Remove ${file.name}` }))));
}

function grow() {
	const box = $("say");
	box.style.height = "auto";
	box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight * 0.4)}px`;
}
