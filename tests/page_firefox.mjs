// A visit to the page in Firefox, by WebDriver BiDi: node tests/page_firefox.mjs FIREFOX ADDRESS FOLDER-OF-NODE-MODULES
// Prints nothing; exits with 1 at the first thing that is wrong.
import { strict as assert } from "node:assert";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [firefox, address, modules] = process.argv.slice(2);
const { default: puppeteer } = await import(pathToFileURL(join(modules, "puppeteer-core/lib/puppeteer/puppeteer-core.js")));
const axe = readFileSync(join(modules, "axe-core/axe.min.js"), "utf8");

const browser = await puppeteer.launch({ browser: "firefox", executablePath: firefox, headless: true });
try {
	const page = await browser.newPage(), errors = [];
	page.setDefaultTimeout(60_000);
	page.on("pageerror", (error) => errors.push(error.message));
	const texts = (selector) => page.$$eval(selector, (all) => all.map((one) => one.innerText.trim()));
	// waitForFunction makes functions from strings in the page, which its policy refuses.
	const until = async (expression) => {
		for (let i = 0; i < 1200; i++) {
			if (await page.evaluate(`Boolean(${expression})`)) return;
			await new Promise((resolve) => setTimeout(resolve, 50));
		}
		throw new Error(`never: ${expression}`);
	};
	const press = (label) => page.locator(`[aria-label="${label}"]`).click();
	const check = async (place) => {
		await page.evaluate(axe);
		const found = await page.evaluate(() => axe.run().then(({ violations }) => violations.filter(({ impact }) => ["serious", "critical"].includes(impact)).map(({ id }) => id)));
		assert.deepEqual(found, [], place);
	};

	await page.setViewport({ width: 390, height: 800 });
	await page.goto(`${address}/ui/`);
	await page.waitForSelector(".prompts button");
	await check("welcome");
	await page.type("#say", "Hello\n");
	await until("document.querySelector('.turn.model .hljs-keyword') && document.querySelector('.turn.model .katex') && document.querySelector('.turn.model .stats')");
	assert.equal(await page.evaluate(() => window.hit), undefined);
	assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
	await press("Retry this answer");
	await until("document.querySelector('.versions')?.innerText.includes('2 of 2')");
	await press("Previous version");
	await until("document.querySelector('.versions').innerText.includes('1 of 2')");
	await page.reload();
	await until("document.querySelector('.turn.model .hljs-keyword')");
	assert.deepEqual(await texts(".versions span"), ["1 of 2"]);
	await press("Theme: system");
	await press("Theme: light");
	assert.equal(await page.evaluate(() => getComputedStyle(document.documentElement).colorScheme), "dark");
	await check("an answer, dark");
	await page.setViewport({ width: 1280, height: 800 });
	await page.goto(`${address}/ui/#/batch`);
	await until("document.querySelectorAll('#gauges .gauge').length === 5");
	await check("batch");
	assert.deepEqual(errors, []);
} finally {
	await browser.close();
}
