// What the page's script does, case by case: node tests/page_cases.mjs NAME, or without a name: the names.
import { strict as assert } from "node:assert";
import { Origin, Tab } from "./page_kit.mjs";

const titles = (tab) => [...tab.page.talks.map((one) => one.title)].sort();
/** Two tabs that know one conversation, "old". */
function two() {
	const origin = new Origin(), first = new Tab(origin);
	first.begin("old");
	first.page.saveNow();
	first.page.talk.run = undefined; // answered
	return [origin, first, new Tab(origin)];
}
const turnsOf = (origin) => [...origin.items].filter(([key]) => key.startsWith("uma.talk.")).map(([, text]) => JSON.parse(text).turns.map((turn) => turn.content).join(" "));
const refusal = (status, body) => async () => ({ ok: false, status, json: async () => { if (!body) throw new SyntaxError("no JSON"); return body; } });
const settled = () => new Promise((done) => setTimeout(done, 5));

const CASES = {
	"closing an idle tab erases nothing"() {
		const [origin, idle, busy] = two();
		busy.begin("long");
		busy.page.saveNow();
		idle.close();
		assert.deepEqual(origin.titles(), ["long", "old"]);
	},
	"what an idle tab only looks at is not written"() {
		const [origin, idle, busy] = two();
		busy.page.say("more");
		busy.page.saveNow();
		idle.page.go(idle.page.talks[0]);
		idle.close();
		assert.match(turnsOf(origin)[0], /old {2}more/);
	},
	"a tab shows what another one writes"() {
		const [, idle, busy] = two();
		busy.begin("long");
		busy.page.saveNow();
		busy.page.go(busy.page.talks.find((one) => one.title === "old"));
		busy.page.say("more");
		busy.page.saveNow();
		idle.wake();
		assert.deepEqual(titles(idle), ["long", "old"]);
		assert.equal(idle.page.talk.title, "old");
		assert.equal(idle.page.talk.turns[2].content, "more");
		assert.equal(idle.$("talks").children.length, 2);
		assert.equal(idle.$("log").children.length, 4);
	},
	"a conversation that is deleted stays deleted"() {
		const [origin, idle, busy] = two();
		idle.begin("kept");
		idle.page.saveNow();
		busy.wake();
		busy.page.drop(busy.page.talks.find((one) => one.title === "old"));
		busy.page.saveNow();
		idle.wake();
		assert.deepEqual(titles(idle), ["kept"]);
		idle.close();
		busy.close();
		assert.deepEqual(origin.titles(), ["kept"]);
	},
	"a conversation that is deleted is answered in no other tab"() {
		const [origin, deleting, answering] = two();
		answering.page.say("more");
		answering.page.saveNow();
		const { abort } = answering.page.talk.run;
		deleting.wake();
		deleting.page.drop(deleting.page.talks[0]);
		answering.wake();
		assert.ok(abort.signal.aborted);
		answering.close();
		assert.deepEqual(origin.titles(), []);
	},
	"deleting all deletes in every tab"() {
		const [origin, idle, busy] = two();
		busy.begin("long");
		busy.page.saveNow();
		idle.$("forget").fire("click");
		busy.wake();
		assert.deepEqual(titles(busy), []);
		idle.close();
		busy.close();
		assert.deepEqual(origin.titles(), []);
	},
	"one conversation that is answered in two tabs becomes two"() {
		const [origin, one, other] = two();
		one.page.say("this");
		other.page.say("that");
		one.page.saveNow();
		other.wake();
		other.close();
		one.wake();
		one.close();
		assert.deepEqual(turnsOf(origin).sort(), ["old  that ", "old  this "]);
		assert.equal(new Set(new Tab(origin).page.talks.map((talk) => talk.id)).size, 2);
	},
	"a tab that comes back takes up what it has missed"() {
		const [origin, away, busy] = two();
		busy.begin("long");
		busy.page.saveNow();
		busy.page.drop(busy.page.talks.find((one) => one.title === "old"));
		away.missed = [];
		away.window.fire("pageshow", { persisted: true });
		assert.deepEqual(titles(away), ["long"]);
		away.close();
		assert.deepEqual(origin.titles(), ["long"]);
	},
	"what cannot be read is left alone"() {
		const [origin] = two();
		for (const [id, text] of [["a", "{"], ["b", '{"turns": 3}'], ["c", "null"]]) origin.items.set(`uma.talk.${id}`, text);
		const tab = new Tab(origin);
		assert.deepEqual(titles(tab), ["old"]);
		tab.begin("long");
		tab.close();
		assert.equal(origin.items.get("uma.talk.a"), "{");
		assert.equal(origin.items.get("uma.talk.b"), '{"turns": 3}');
	},
	"a conversation that has no room is stored when it has"() {
		const [origin, tab] = two();
		origin.most = 10;
		tab.begin("long");
		tab.page.saveNow();
		assert.match(tab.$("notice").textContent, /no room/);
		origin.most = Infinity;
		tab.page.saveNow();
		assert.deepEqual(origin.titles(), ["long", "old"]);
	},
	"a reload opens the conversation of this tab"() {
		const [origin, first] = two(), session = new Map(), tab = new Tab(origin, { session });
		tab.begin("mine");
		tab.close();
		first.page.go(first.page.talks[0]);
		first.page.saveNow();
		assert.equal(new Tab(origin, { session }).page.talk.title, "mine");
		assert.equal(new Tab(origin).page.talk.title, "old");
	},
	"conversations of an earlier page are found"() {
		const origin = new Origin();
		const talks = ["new", "old"].map((title) => ({ id: title, title, said: {}, turns: [{ role: "user", content: title }] }));
		origin.items.set("uma.talks", JSON.stringify(talks));
		const tab = new Tab(origin);
		tab.page.saveNow();
		assert.deepEqual([...tab.page.talks].map((one) => one.title), ["new", "old"]);
		assert.deepEqual(origin.titles(), ["new", "old"]);
		assert.ok(!origin.items.has("uma.talks"));
	},
	"only what the person has set is asked for"() {
		const { page } = new Tab();
		const sent = (said) => { page.talk.said = said; return Object.keys(page.bodyOf([])).sort(); };
		const always = ["messages", "model", "return_progress", "stream", "stream_options"];
		assert.deepEqual(sent({}), always);
		assert.deepEqual(sent({ temperature: "0", top_p: "", seed: "7" }), [...always, "seed", "temperature"].sort());
	},
	async "a refusal is no daemon that does not answer"() {
		const tab = new Tab(new Origin(), { fetch: refusal(503, { error: { message: "code is not loaded" } }) });
		tab.$("batch").hidden = false;
		tab.page.watch();
		await settled();
		assert.equal(tab.$("nothing").textContent, "code is not loaded.");
		assert.equal(tab.$("state").textContent, "connected");
		assert.equal(tab.$("notice").textContent, "");
	},
	async "a proxy without a daemon behind it is one"() {
		const tab = new Tab(new Origin(), { fetch: refusal(503, null) });
		await settled();
		assert.equal(tab.$("state").textContent, "no daemon");
	},
	"Markdown becomes elements"() {
		const { page } = new Tab();
		for (const [text, made] of [
			["# C#", "h1(C#)"], ["## a ##", "h2(a)"], ["# #", "h1()"], ["#  x  ", "h1(x)"], ["# a # b ##", "h1(a # b)"],
			["a ``b`c`` `d`", "p(a code(b`c) code(d))"], ["a```", "p(a```)"], ["***", "hr()"], ["- a\n# h", "ul(li(a))h1(h)"],
			["- a\n\n- b\n\nc", "ul(li(a)li(b))p(c)"], ["a\n- b", "p(a)ul(li(b))"], ["> # q\n> - a", "blockquote(h1(q)ul(li(a)))"],
			["```\nfoo bar\n```", "div(div(span(text)button(Copy))pre(code(foo bar)))"], ["```py\nx\n```", "div(div(span(py)button(Copy))pre(code(x)))"],
		]) assert.equal(page.blocksOf(text).map((one) => String(page.block(one))).join(""), made, text);
	},
	"Markdown of any shape is shown in time by its length"() {
		const { page, $ } = new Tab(), N = 250_000;
		const long = (unit) => unit.repeat(Math.ceil(N / unit.length));
		const growing = Array.from({ length: 700 }, (_, n) => "`".repeat(n + 1)).join(" ");
		const nested = Array.from({ length: 700 }, (_, n) => `${" ".repeat(n)}- a`).join("\n");
		for (const text of [
			`# ${long("#")}x`, `# a${long(" ")}x`, `# ${long("# ")}x`, `a${long("`")}`, long("a ` "), long("``a`"), `a ${growing}`,
			...["*a", "**a ", "a**", "a*", "a~~", "~~a ", "a[", "[a](", "![", "[a](http://a   ", '[a](http://a "', "a http://b", "<http://", "a\\*", "[`*~", "`a``b*", "*a**b~~c`d[e](f"].map(long),
			`[a](http://${long("a")}`, `http://${long(".")}`, `${long("- ")}x`, `--${long(" ")}x`, `${long("-")}x`, long("_"), `${long("_ ")}x`, `${long(" ")}x`, `${long(" ")}x\n${long("x\n")}`, `-${long(" ")}x\n${long("b\n")}`,
			long("a\n"), long("- a\n"), nested, `- a\n${long(" \n")}`, `${long("1")}. `, `|a|\n|-|\n${long("|")}`, `a|b\n${long("-")}\nx`, `|a|\n|-|\n${long("|a|\n")}`, long("> "), long("> a\n"), long(`${">".repeat(50)}a\n`),
			`\`\`\`${long(" ")}x`, long("```\n"), `\`\`\`\n${long("a\n")}`, `~~~~\n${long("~~~\n")}`, `${long("`")}\n${long("```\n")}`, long("\n"),
		]) page.markdown($(`shape of ${text.slice(0, 9)}`), text);
	},
};

const [name] = process.argv.slice(2);
if (name === undefined) console.log(JSON.stringify(Object.keys(CASES)));
else await CASES[name]();
process.exit();
