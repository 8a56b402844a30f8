// Markdown to HTML, in a worker: what a model writes may take its parser long, and the page then ends the worker.
// The HTML is not trusted: markdown.js sanitizes it.

import { Marked } from "./vendor/marked/marked.esm.js";
import hljs from "./vendor/highlight/highlight.min.js";

const escape = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

// Formulas as TeX in elements of class "math"; markdown.js has them drawn.
const mathOf = (patterns) => (source) => {
	for (const [pattern, isDisplayed] of patterns) {
		const [raw, text] = pattern.exec(source) ?? [];
		if (raw) return { type: "math", raw, text, isDisplayed };
	}
	return undefined;
};
const math = {
	name: "math",
	renderer: ({ text, isDisplayed }) => `<span class="${isDisplayed ? "math display" : "math"}">${escape(text)}</span>`,
};
const inlineMath = {
	...math,
	level: "inline",
	start: (source) => source.search(/\$|\\[([]/),
	// A dollar before a space or after one, or before a digit, is money.
	tokenizer: mathOf([
		[/^\$\$([^$]+)\$\$/, true], [/^\\\[([\s\S]+?)\\\]/, true], [/^\\\(([\s\S]+?)\\\)/, false],
		[/^\$((?=[^\s$])(?:\\.|[^\\$\n])*(?<!\s))\$(?!\d)/, false],
	]),
};
const blockMath = {
	...math,
	name: "blockMath",
	level: "block",
	start: (source) => source.search(/^ {0,3}(?:\$\$|\\\[)/m),
	tokenizer(source) {
		const token = mathOf([[/^ {0,3}\$\$([^$]+)\$\$ *(?:\n|$)/, true], [/^ {0,3}\\\[([\s\S]+?)\\\] *(?:\n|$)/, true]])(source);
		return token && { ...token, type: "blockMath" };
	},
	renderer: (token) => `<p>${math.renderer(token)}</p>`,
};

const highlighted = new Map(); // the blocks of an answer that grows are highlighted once
function highlight(code, language) {
	const key = `${language}\n${code}`;
	if (!highlighted.has(key)) {
		if (highlighted.size > 200) highlighted.clear();
		const isKnown = language && code.length < 50_000 && hljs.getLanguage(language);
		highlighted.set(key, isKnown ? hljs.highlight(code, { language, ignoreIllegals: true }).value : escape(code));
	}
	return highlighted.get(key);
}
function codeBlock({ text, lang }) {
	const language = /^[^\s`]*/.exec(lang ?? "")[0];
	return `<pre><code class="language-${escape(language)}">${highlight(text, language.toLowerCase())}</code></pre>`;
}

const answers = new Marked({
	gfm: true,
	breaks: true,
	extensions: [inlineMath, blockMath],
	tokenizer: { html: () => undefined, tag: () => undefined }, // HTML is text
	renderer: {
		code: codeBlock,
		image({ href, text }) { return `<a href="${escape(href)}">${escape(text || href)}</a>`; }, // no request leaves the page by itself
	},
});

/** Format an answer: HTML of each block, so that the page replaces only those that changed. */
function formatAnswer(text) {
	const tokens = answers.lexer(text);
	return tokens.filter(({ type }) => type !== "space" && type !== "def").map((token) => answers.parser([token]));
}

/** Format what a person wrote: as it stands, but for blocks of code. */
function formatMessage(text) {
	const blocks = [];
	let plain = "";
	const flush = () => {
		if (plain.trim()) blocks.push(`<p>${escape(plain.replace(/^\n+|\s+$/g, ""))}</p>`);
		plain = "";
	};
	for (const token of answers.lexer(text)) {
		if (token.type === "code" && token.codeBlockStyle !== "indented") {
			flush();
			blocks.push(codeBlock(token));
		} else plain += token.raw;
	}
	flush();
	return blocks;
}

self.onmessage = ({ data: { text, isAnswer } }) => {
	try {
		self.postMessage({ blocks: (isAnswer ? formatAnswer : formatMessage)(text) });
	} catch {
		self.postMessage({ blocks: null }); // nested more deeply than the parser can
	}
};
self.postMessage({ isReady: true });
