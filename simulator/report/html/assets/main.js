"use strict";
// Puts the page together once its data are unpacked.

const NO_MEMORY = "Nothing is known of this run's memory.";

class Page {
  constructor(runs, named) {
    this.runs = runs;
    this.colours = new Colours(named);
    this.view = new View(runs);
    const { view, colours } = this;
    this.inspector = new Inspector(view, colours);
    this.timelines = runs.map((run) => new Timeline(run, view, colours, this.inspector));
    this.overviews = this.timelines.map((timeline) => new Overview(timeline));
    this.search = new Search(this.timelines, view);
    this.charts = [];
    for (const run of runs) this.charts.push(new MemoryChart(run, view, colours, this.charts));
    this.maps = runs.map((run) => (run.about.links ? new LinkMap(run, view, colours) : null));
    this.summary = element("div");
  }

  /** Put all sections into an element. */
  fill(main) {
    const { runs, colours, timelines } = this;
    const communication = runs.map((run, k) => [this.name(k), flowsOf(run, colours)]);
    const links = (k) => this.maps[k]?.element ?? aside(runs[k].about.noLinks);
    const memory = (k) => (runs[k].about.memory.length ? this.charts[k].element : aside(NO_MEMORY));
    const assumed = element("div", { class: "assumed" }, assumptionsOf(runs));
    const bar = toolbarOf(timelines, this.view, colours, this.search);
    main.replaceChildren(
      this.summary,
      section("Timeline", "timeline", bar, this.board()),
      this.both("Memory in the last step", "memory", memory),
      this.both("Links in the last step", "links", links),
      section("Communication", "communication", communication),
      section("Assumptions and notes", "assumptions", assumed),
    );
  }

  /** Return the timelines, and the panel beside them. */
  board() {
    const plots = this.timelines.map((timeline, k) => {
      const { kept } = timeline.run.about;
      return [this.name(k), this.overviews[k].element, timeline.element, kept ? aside(kept) : null];
    });
    const left = element("div", { class: "plots" }, plots);
    return element("div", { class: "board" }, left, this.inspector.element);
  }

  /** Return a section with a part for each run, beside each other. */
  both(title, id, part) {
    const parts = this.runs.map((_, k) => element("div", {}, this.name(k), part(k)));
    return section(title, id, element("div", { class: `pair n${this.runs.length}` }, parts));
  }

  /** Return the name of a run, where there are two. */
  name(k) {
    if (this.runs.length === 1) return null;
    const letter = element("b", { class: "letter" }, LETTERS[k]);
    return element("h3", {}, letter, this.runs[k].about.name);
  }

  /** Draw all of it in the colours of the theme. */
  paint() {
    this.colours.read();
    this.summary.replaceChildren(...summaryOf(this.runs, this.colours));
    for (const timeline of this.timelines) timeline.draw();
    for (const overview of this.overviews) overview.repaint();
    for (const chart of this.charts) chart.build();
    for (const map of this.maps) map?.redraw();
  }

  /** Clear what is searched, selected and followed. */
  clear() {
    this.search.clear();
    this.view.select(null);
    for (const timeline of this.timelines) timeline.choose(null);
  }

  onKey(event) {
    if (/INPUT|SELECT/.test(event.target.tagName)) return;
    const { chosen } = this.view;
    if (event.key === "Escape") this.clear();
    if (event.key === "f" && chosen) chosen.timeline.choose(chosen);
    if (event.key !== "/") return;
    event.preventDefault();
    this.search.input.focus();
  }
}

async function main() {
  const parts = [...document.querySelectorAll("script[type='application/json']")];
  const data = parts.map((part) => JSON.parse(part.textContent));
  const runs = [];
  for (const { about, head, columns } of data)
    runs.push(new Run(about, await unpacked(head, columns)));
  const page = new Page(runs, data[0].colours);
  page.fill(document.querySelector("main"));
  page.paint();
  themeButton(() => page.paint());
  document.addEventListener("keydown", (event) => page.onKey(event));
  window.trainsim = page;
  // The page counts as interactive when all is drawn and a frame has come to the screen after it.
  const done = () => {
    document.documentElement.dataset.interactive = String(Math.round(performance.now()));
  };
  requestAnimationFrame(() => requestAnimationFrame(done));
}

/** Let the button of the page's head go from the system's theme to the other and back. */
function themeButton(repaint) {
  const root = document.documentElement;
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
