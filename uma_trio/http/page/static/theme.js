// Loaded before the first paint, so that the page does not flash in the other theme.
try {
	document.documentElement.dataset.theme = localStorage.getItem("uma.theme") ?? "system";
} catch { /* the browser stores nothing for this page */ }
