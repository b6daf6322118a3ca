"use strict";
// Puts the page together once its data are unpacked.

async function main() {
  const parts = [...document.querySelectorAll("script[type='application/json']")].map((script) =>
    JSON.parse(script.textContent),
  );
  const { colours: named } = parts[0];
  const runs = [];
  for (const { about, head, data } of parts) runs.push(new Run(about, await unpacked(head, data)));
  const root = document.documentElement;
  const colours = new Colours(named);
  const view = new View(runs);
  const page = document.querySelector("main");
  const inspector = new Inspector(view, colours);
  const timelines = runs.map((run) => new Timeline(run, view, colours, inspector));
  const overviews = timelines.map((timeline) => new Overview(timeline));
  const search = new Search(timelines, view);
  const charts = [];
  for (const run of runs) charts.push(new MemoryChart(run, view, colours, charts));
  const maps = runs.map((run) => (run.about.links ? new LinkMap(run, view, colours) : null));
  const headed = (k) =>
    runs.length > 1
      ? element("h3", {}, element("b", { class: "letter" }, "AB"[k]), runs[k].about.name)
      : null;
  const both = (title, id, each) =>
    section(
      title,
      id,
      element(
        "div",
        { class: `pair n${runs.length}` },
        runs.map((_, k) => element("div", {}, headed(k), each(k))),
      ),
    );

  page.replaceChildren(
    ...summaryOf(runs, colours).flat(),
    section(
      "Timeline",
      "timeline",
      toolbarOf(timelines, view, colours, search),
      element(
        "div",
        { class: "board" },
        element(
          "div",
          { class: "plots" },
          timelines.map((timeline, k) => [
            headed(k),
            overviews[k].element,
            timeline.element,
            timeline.run.about.kept
              ? element("p", { class: "faint" }, timeline.run.about.kept)
              : null,
          ]),
        ),
        inspector.element,
      ),
    ),
    both("Memory", "memory", (k) => charts[k].element),
    both(
      "Links",
      "links",
      (k) => maps[k]?.element ?? element("p", { class: "faint" }, runs[k].about.noLinks),
    ),
    section(
      "Communication",
      "communication",
      runs.map((run, k) => [headed(k), flowsOf(run, colours)]),
    ),
    section(
      runs.length > 1 ? "Assumptions" : "Assumptions and notes",
      "assumptions",
      element("div", { class: "assumed" }, assumptionsOf(runs)),
    ),
  );
  const repaint = () => {
    colours.read();
    for (const overview of overviews) {
      overview.picture = null;
      overview.redraw();
    }
    for (const chart of charts) chart.build();
    for (const map of maps) map?.redraw();
    view.tell("look");
  };
  themeButton(root, repaint);
  document.addEventListener("keydown", (event) => {
    if (/INPUT|SELECT/.test(event.target.tagName)) return;
    if (event.key === "/") {
      event.preventDefault();
      search.input.focus();
    } else if (event.key === "Escape") {
      search.clear();
      view.select(null);
      for (const timeline of timelines) timeline.choose(null);
    }
  });
  for (const timeline of timelines) timeline.draw();
  for (const overview of overviews) overview.draw();
  for (const chart of charts) chart.build();
  window.trainsim = { runs, view, timelines, charts, search, inspector };
  // The page counts as interactive when all is drawn and a frame has come to the screen after it.
  requestAnimationFrame(() =>
    requestAnimationFrame(() => {
      root.dataset.interactive = String(Math.round(performance.now()));
    }),
  );
}

/** Let the button of the page's head go from the system's theme to the other and back. */
function themeButton(root, repaint) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", repaint);
  document.querySelector("#theme").addEventListener("click", () => {
    const dark = (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
    root.dataset.theme = dark ? "light" : "dark";
    repaint();
  });
}

main().catch((error) => {
  const old = typeof DecompressionStream === "undefined";
  document.querySelector("main").textContent = old
    ? "This page needs a browser of 2023 or later: Chrome 80, Safari 16.4, Firefox 113."
    : `This page cannot be shown: ${error.message}`;
  throw error;
});
