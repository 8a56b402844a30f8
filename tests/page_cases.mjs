// What the page does with conversations and answers, case by case: node tests/page_cases.mjs NAME, or without a name: the names.
import { strict as assert } from "node:assert";
import { answers, conversations, daemon, Origin, streamed, Tab } from "./page_kit.mjs";

const { append, choose, parseConversation, path, search, versionsOf } = conversations;

/** Two tabs that know one conversation, "old". */
function two() {
	const origin = new Origin(), first = new Tab(origin);
	first.begin("old");
	first.save();
	return [origin, first, new Tab(origin)];
}
const newMessage = () => ({ role: "assistant", content: "", reasoning: "", calls: [], stats: {}, partial: true });
const newRun = () => ({ abort: new AbortController(), startedAt: 0, wait: null });
const delta = (part, reason) => ({ choices: [{ delta: part, finish_reason: reason }] });

const CASES = {
	// --- tabs ---
	"closing an idle tab erases nothing"() {
		const [origin, idle, busy] = two();
		busy.begin("long");
		busy.save();
		idle.close();
		assert.deepEqual(origin.titles(), ["long", "old"]);
	},
	"an idle tab that writes keeps what it has not heard of"() {
		const [origin, idle, busy] = two();
		busy.say("more");
		busy.save();
		idle.find("old").settings.seed = "7";
		idle.store.touch(idle.find("old"));
		idle.close();
		assert.equal(origin.stored[0].settings.seed, "7");
		assert.equal(origin.stored[0].messages.length, 4);
	},
	"a tab shows what another one writes"() {
		const [, idle, busy] = two();
		busy.say("more");
		busy.begin("long");
		busy.save();
		idle.wake();
		assert.deepEqual(idle.titles, ["long", "old"]);
		assert.equal(idle.store.current.title, "old");
		assert.equal(idle.shown(), "old re old more re more");
	},
	"one conversation that is answered in two tabs gets two versions"() {
		const [origin, one, other] = two();
		one.say("this");
		other.say("that");
		one.save();
		other.save();
		one.wake();
		assert.equal(one.shown(), "old re old this re this");
		assert.equal(other.shown(), "old re old that re that");
		const third = new Tab(origin), question = path(third.store.current)[2];
		assert.deepEqual(versionsOf(third.store.current, question).map(({ content }) => content).sort(), ["that", "this"]);
	},
	"an answer that another tab writes grows"() {
		const [, idle, busy] = two();
		const answer = busy.say("more");
		busy.save();
		idle.wake();
		answer.content = "a longer answer";
		busy.store.touch(busy.store.current, answer);
		busy.save();
		idle.wake();
		assert.match(idle.shown(), /more a longer answer$/);
	},
	"a conversation that is deleted stays deleted"() {
		const [origin, idle, busy] = two();
		idle.begin("kept");
		idle.save();
		busy.wake();
		busy.store.remove(busy.find("old"));
		idle.say("more", idle.find("old"));
		idle.wake();
		assert.deepEqual(idle.titles, ["kept"]);
		idle.close();
		busy.close();
		assert.deepEqual(origin.titles(), ["kept"]);
	},
	"an answer that ends after its conversation was deleted does not bring it back"() {
		const [origin, writing, deleting] = two();
		const conversation = writing.store.current, answer = writing.say("more");
		let removed = null;
		writing.store.addEventListener("remove", ({ detail }) => { removed = detail.conversation; });
		deleting.store.remove(deleting.find("old"));
		writing.wake();
		assert.equal(removed, conversation);
		writing.store.touch(conversation, answer);
		writing.close();
		assert.deepEqual(origin.titles(), []);
	},
	"a deletion that a tab has not heard of holds, too"() {
		const [origin, writing, deleting] = two();
		deleting.store.remove(deleting.find("old"));
		writing.say("more");
		writing.close();
		assert.deepEqual(origin.titles(), []);
	},
	"a tab that comes back takes in what it has missed"() {
		const [origin, away, busy] = two();
		busy.begin("long");
		busy.save();
		busy.store.remove(busy.find("old"));
		away.missed = [];
		away.store.catchUp();
		assert.deepEqual(away.titles, ["long"]);
		away.close();
		assert.deepEqual(origin.titles(), ["long"]);
	},
	"what cannot be read is left alone"() {
		const [origin] = two();
		for (const [id, text] of [["a", "{"], ["b", '{"messages": 3}'], ["c", "null"]]) origin.items.set(`uma.talk.${id}`, text);
		const tab = new Tab(origin);
		assert.deepEqual(tab.titles, ["old"]);
		tab.begin("long");
		tab.close();
		assert.equal(origin.items.get("uma.talk.a"), "{");
		assert.equal(origin.items.get("uma.talk.b"), '{"messages": 3}');
	},
	"a conversation that has no room is stored when it has"() {
		const [origin, tab] = two();
		origin.most = 10;
		tab.begin("long");
		tab.save();
		assert.equal(tab.store.isFull, true);
		origin.most = Infinity;
		tab.save();
		assert.equal(tab.store.isFull, false);
		assert.deepEqual(origin.titles(), ["long", "old"]);
	},
	"a reload opens the conversation of this tab"() {
		const [origin, first] = two(), session = new Map(), tab = new Tab(origin, session);
		tab.begin("mine");
		tab.close();
		first.store.open(first.find("old"));
		assert.equal(new Tab(origin, session).store.current.title, "mine");
		assert.equal(new Tab(origin).store.current.title, "old");
	},
	"conversations of earlier pages are found"() {
		const turns = [{ role: "user", content: "hello" }, { role: "assistant", content: "half", cut: true }];
		const origin = new Origin();
		origin.items.set("uma.talks", JSON.stringify(["new", "old"].map((title) => ({ id: title, title, said: { seed: "7" }, turns }))));
		origin.items.set("uma.talk.one", JSON.stringify({ id: "one", title: "one", at: 9, said: {}, turns }));
		const tab = new Tab(origin);
		assert.deepEqual(tab.store.conversations.map(({ title }) => title), ["one", "new", "old"]);
		assert.equal(tab.shown(tab.find("old")), "hello half");
		assert.equal(tab.find("old").settings.seed, "7");
		assert.equal(path(tab.find("one"))[1].partial, true);
		assert.deepEqual(origin.titles(), ["new", "old", "one"]);
		assert.ok(!origin.items.has("uma.talks"));
	},

	// --- versions ---
	"a retry and an edit keep what was there"() {
		const tab = new Tab(), conversation = tab.begin("first");
		tab.say("second");
		const [question, answer] = path(conversation);
		const retried = append(conversation, question, { role: "assistant", content: "other" });
		assert.equal(tab.shown(), "first other");
		choose(conversation, answer);
		assert.equal(tab.shown(), "first re first second re second");
		tab.say("edited", conversation, null);
		assert.equal(tab.shown(), "edited re edited");
		choose(conversation, question);
		assert.equal(tab.shown(), "first re first second re second");
		choose(conversation, retried);
		assert.equal(tab.shown(), "first other");
		assert.equal(versionsOf(conversation, answer).length, 2);
		assert.equal(versionsOf(conversation, question).length, 2);
	},
	"a reload shows the version that was chosen"() {
		const origin = new Origin(), tab = new Tab(origin), conversation = tab.begin("first");
		const [question, answer] = path(conversation);
		append(conversation, question, { role: "assistant", content: "other" });
		choose(conversation, answer);
		tab.store.touch(conversation);
		tab.close();
		assert.equal(new Tab(origin).shown(), "first re first");
	},

	// --- search, export, import ---
	"a search finds titles and messages of every version"() {
		const tab = new Tab();
		tab.begin("A fox");
		const other = tab.begin("Maths");
		append(other, null, { role: "user", content: "What of the FOX?", files: [{ name: "den.txt", text: "" }] });
		assert.deepEqual(search(tab.store.conversations, " fox ").map(({ conversation, excerpt }) => [conversation.title, excerpt]).sort(), [["A fox", ""], ["Maths", "What of the FOX?"]]);
		assert.deepEqual(search(tab.store.conversations, "den.txt").map(({ conversation }) => conversation.title), ["Maths"]);
		assert.equal(search(tab.store.conversations, "wolf").length, 0);
		assert.equal(search(tab.store.conversations, "").length, 2);
	},
	"an export that is imported again changes nothing, and adds what was deleted"() {
		const tab = new Tab(), contents = () => tab.store.conversations.map(({ title, messages }) => [title, messages.map(({ content }) => content)]);
		tab.begin("kept");
		tab.begin("deleted");
		tab.save();
		const text = tab.store.export(), before = contents();
		tab.store.remove(tab.find("deleted"));
		tab.say("since", tab.find("kept"));
		assert.equal(tab.store.import(JSON.parse(text)), 2);
		before.find(([title]) => title === "kept")[1].push("since", "re since");
		assert.deepEqual(contents().sort(), before.sort());
		assert.deepEqual(tab.origin.titles(), ["deleted", "kept"]);
	},
	"an import with circles, strangers and wrong types is cut down to what holds"() {
		const message = (id, parent, more = {}) => ({ id, parent, chosen: id, role: "user", content: id, ...more });
		const found = parseConversation({
			id: "x", title: 3, settings: { seed: 7, system: "be brief" }, chosen: "gone",
			messages: [message("a", null), message("b", "c"), message("c", "b"), message("d", "d"), null, 7, [], message("a", null), message("e", "a", { role: "system" }),
				message("f", "a", { files: [{ name: 1, text: "t" }, "no"], calls: 3, content: {} })],
		});
		assert.deepEqual(found.messages.map(({ id }) => id), ["a", "f"]);
		assert.deepEqual(path(found).map(({ id }) => id), ["a", "f"]);
		assert.deepEqual([found.title, found.settings, found.messages[1].files, found.messages[1].content], ["", { system: "be brief" }, [{ name: "", text: "t" }], ""]);
		for (const raw of [null, 3, "x", [], {}, { messages: {} }]) assert.equal(parseConversation(raw), null);
	},

	// --- requests and answers ---
	"only what the person has set is asked for"() {
		const sent = (settings) => Object.keys(answers.bodyOf({ settings, model: "m" }, [])).sort();
		const always = ["default_temperature", "messages", "model", "return_progress", "stream", "stream_options"];
		assert.deepEqual(sent({}), always);
		assert.deepEqual(sent({ temperature: "0", top_p: "", seed: "7" }), [...always, "seed", "temperature"].sort());
		assert.equal(answers.bodyOf({ settings: {}, model: "m" }, []).default_temperature, 0.7);
	},
	"without a chosen model that is served the first one that writes answers, as the page shows"() {
		daemon.daemon.models = [{ id: "vectors", isChat: false }, { id: "m", isChat: true }];
		assert.equal(answers.bodyOf({ settings: {}, model: "" }, []).model, "m");
		assert.equal(answers.bodyOf({ settings: {}, model: "gone" }, []).model, "m");
	},
	"an answer that has text is continued, an empty one is written"() {
		const question = { role: "user", content: "hello" };
		const body = (content) => answers.bodyOf({ settings: { system: "be brief" }, model: "m" }, [question, { role: "assistant", content }]);
		assert.equal(body("half").continue_final_message, true);
		assert.deepEqual(body("").messages, [{ role: "system", content: "be brief" }, question]);
		assert.equal(body("").continue_final_message, undefined);
	},
	"a file goes before the message, in a fence that it does not close"() {
		const text = answers.textOf({ content: "explain", files: [{ name: "a.md", text: "```\nx\n```" }, { name: "b.txt", text: "y\n" }] });
		assert.equal(text, "a.md\n````\n```\nx\n```\n````\n\nb.txt\n```\ny\n```\n\nexplain");
	},
	async "a stream fills the message and says when it is whole"() {
		globalThis.fetch = async () => streamed(
			{ prompt_progress: { total: 9, processed: 4, cache: 0 } }, delta({ reasoning_content: "hm" }), delta({ content: "Hel" }), delta({ content: "lo" }),
			delta({ tool_calls: [{ index: 0, function: { name: "f", arguments: "{" } }] }), delta({ tool_calls: [{ index: 0, function: { arguments: "}" } }] }),
			{ ...delta({}, "stop"), timings: { cache_n: 2, prompt_n: 7, predicted_n: 5, predicted_per_second: 9.5, queue_ms: 1 } }, "[DONE]");
		const message = newMessage(), waits = [], run = newRun();
		await answers.stream({}, message, run, () => waits.push(run.wait?.value));
		assert.deepEqual([message.content, message.reasoning, message.calls], ["Hello", "hm", [{ name: "f", arguments: "{}" }]]);
		assert.deepEqual([message.partial, message.stats.reason, message.stats.prompt, waits[0], waits[1]], [false, "stop", 9, 4, undefined]);
	},
	async "an answer that is cut stays partial"() {
		for (const [events, error] of [[[delta({ content: "half" }, "length"), "[DONE]"], null], [[delta({ content: "half" })], TypeError], [[delta({ content: "half" }), { error: { message: "no" } }], daemon.Refused]]) {
			globalThis.fetch = async () => streamed(...events);
			const message = newMessage(), done = answers.stream({}, message, newRun(), () => {});
			if (error) await assert.rejects(done, error); else await done;
			assert.deepEqual([message.content, message.partial], ["half", true]);
		}
	},
	async "a refusal is told from a daemon that does not answer"() {
		const answer = (status, body) => { globalThis.fetch = async () => new Response(body, { status }); };
		answer(503, '{"error": {"message": "code is not loaded"}}');
		await assert.rejects(daemon.request("/health"), (error) => error instanceof daemon.Refused && error.message === "code is not loaded");
		answer(502, "<html>Bad Gateway</html>");
		await assert.rejects(daemon.request("/health"), TypeError);
	},
};

const [name] = process.argv.slice(2);
if (name === undefined) console.log(JSON.stringify(Object.keys(CASES)));
else await CASES[name]();
process.exit();
