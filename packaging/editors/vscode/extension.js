// Completion, questions and rewriting with the daemon's model; api.js speaks with it.
"use strict";

const vscode = require("vscode");
const { chat, codeOf, complete } = require("./api");

const PREFIX_CHARACTERS = 2000; // what comes before the cursor, for a suggestion
const PAUSE_MS = 150; // nobody is asked before typing pauses this long

function settings() {
  const given = vscode.workspace.getConfiguration("uma-trio");
  return {
    daemon: { url: given.get("url"), key: given.get("key") },
    completion: given.get("completion"),
    tokens: given.get("completionTokens"),
  };
}

/** Return a signal that aborts when `token` is cancelled. */
function signalOf(token) {
  const controller = new AbortController();
  if (token.isCancellationRequested) controller.abort();
  token.onCancellationRequested(() => controller.abort());
  return controller.signal;
}

const suggestions = {
  async provideInlineCompletionItems(document, position, _context, token) {
    const { daemon, completion, tokens } = settings();
    if (!completion) return [];
    await new Promise((wake) => setTimeout(wake, PAUSE_MS));
    if (token.isCancellationRequested) return [];
    const at = document.offsetAt(position);
    const start = document.positionAt(Math.max(0, at - PREFIX_CHARACTERS));
    const prefix = document.getText(new vscode.Range(start, position));
    if (!prefix.trim()) return [];
    try {
      const text = await complete(daemon, prefix, tokens, signalOf(token));
      return text ? [new vscode.InlineCompletionItem(text, new vscode.Range(position, position))] : [];
    } catch {
      return []; // a suggestion that does not come is no message
    }
  },
};

/** Run `work` with progress that can be cancelled; tell what went wrong. */
async function told(title, work) {
  const options = { location: vscode.ProgressLocation.Notification, title, cancellable: true };
  await vscode.window.withProgress(options, async (_progress, token) => {
    try {
      await work(signalOf(token));
    } catch (error) {
      if (token.isCancellationRequested) return;
      const why = error.cause?.code === "ECONNREFUSED" ? "no daemon answers; start one with uma-trio serve" : error.message;
      vscode.window.showErrorMessage(`uma-trio: ${why}`);
    }
  });
}

async function ask() {
  const editor = vscode.window.activeTextEditor;
  const question = await vscode.window.showInputBox({ prompt: "What do you want to know?" });
  if (!question) return;
  const selected = editor ? editor.document.getText(editor.selection) : "";
  const content = selected ? `${question}\n\n\`\`\`\n${selected}\n\`\`\`` : question;
  const answer = await vscode.workspace.openTextDocument({ language: "markdown", content: `# ${question}\n\n` });
  const shown = await vscode.window.showTextDocument(answer, { viewColumn: vscode.ViewColumn.Beside, preview: true });
  await told("uma-trio answers", async (signal) => {
    for await (const part of chat(settings().daemon, "ask", [{ role: "user", content }], signal)) {
      const end = answer.lineAt(answer.lineCount - 1).range.end;
      await shown.edit((edit) => edit.insert(end, part), { undoStopBefore: false, undoStopAfter: false });
    }
  });
}

async function refactor() {
  const editor = vscode.window.activeTextEditor;
  if (!editor || editor.selection.isEmpty) return;
  const wish = await vscode.window.showInputBox({ prompt: "How should it be rewritten?" });
  if (!wish) return;
  const { document } = editor;
  const range = new vscode.Range(editor.selection.start, editor.selection.end);
  const before = document.getText(range);
  const version = document.version;
  const content = `Rewrite this ${document.languageId} code: ${wish}\nAnswer with the code only.\n\n\`\`\`\n${before}\n\`\`\``;
  await told("uma-trio rewrites", async (signal) => {
    let text = "";
    for await (const part of chat(settings().daemon, "refactor", [{ role: "user", content }], signal)) text += part;
    if (document.version !== version && document.getText(range) !== before) {
      throw new Error("the code was changed meanwhile; nothing was replaced");
    }
    const edit = new vscode.WorkspaceEdit();
    edit.replace(document.uri, range, codeOf(text), { label: "uma-trio", needsConfirmation: true });
    await vscode.workspace.applyEdit(edit);
  });
}

exports.activate = (context) => {
  context.subscriptions.push(
    vscode.languages.registerInlineCompletionItemProvider({ pattern: "**" }, suggestions),
    vscode.commands.registerCommand("uma-trio.ask", ask),
    vscode.commands.registerCommand("uma-trio.refactor", refactor),
  );
};

exports.deactivate = () => {};
