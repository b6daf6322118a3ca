"use strict";
// Search: which ops have what is asked for.

const FIELDS = {
  mb: "microbatch",
  microbatch: "microbatch",
  stage: "stage",
  layer: "layer",
  step: "step",
};

/** Return a test of (row, place) for a text such as `F3` or `layer:12 stage:1`; null for none. */
function wantedBy(run, text) {
  const terms = text
    .trim()
    .toLowerCase()
    .replace(/\b(mb|microbatch|stage|layer|step|rank)[ :=]+(?=\d)/g, "$1:")
    .split(/\s+/)
    .filter(Boolean);
  const tests = terms.map((term) => testOf(run, term));
  return tests.length ? (row, place) => tests.every((test) => test(row, place)) : null;
}

function testOf(run, term) {
  const { columns } = run;
  const [, field, number] = /^([a-z]+):(\d+)$/.exec(term) ?? [];
  if (field === "rank") {
    const place = run.placeOf[Number(number)];
    return (row, at) => at === place;
  }
  if (FIELDS[field]) {
    const column = columns[FIELDS[field]];
    const value = Number(number);
    return (row) => column[row] === value;
  }
  const [, action, microbatch] = /^(f|b|i|w)(\d+)$/.exec(term) ?? [];
  if (action) {
    const code = run.about.actions.indexOf(action.toUpperCase());
    const value = Number(microbatch);
    return (row) =>
      columns.action[row] === code && columns.microbatch[row] === value && !run.isMoving(row);
  }
  // Words are looked for in names, of which there are few.
  const costs = run.about.costs.map((cost) => cost.name.toLowerCase().includes(term));
  const tracks = run.tracks.map((name) => name.toLowerCase().includes(term));
  const kinds = run.kinds.map((name) => name.toLowerCase() === term);
  const actions = run.about.actions.map((name) => name.toLowerCase() === term);
  return (row) =>
    costs[columns.cost[row]] ||
    tracks[columns.track[row]] ||
    kinds[columns.kind[row]] ||
    actions[columns.action[row]];
}

class Search {
  constructor(timelines, view) {
    Object.assign(this, { timelines, view, hits: [], at: -1 });
    this.input = element("input", {
      type: "search",
      placeholder: "Search: F3, all_reduce, layer 12",
      "aria-label": "Search ops",
      spellcheck: "false",
      oninput: () => this.later(),
      onkeydown: (event) => this.onKey(event),
    });
    this.count = element("output", { class: "faint" });
    this.element = element(
      "div",
      { class: "search", role: "search" },
      this.input,
      element("button", { onclick: () => this.go(-1), "aria-label": "previous match" }, "‹"),
      element("button", { onclick: () => this.go(1), "aria-label": "next match" }, "›"),
      this.count,
    );
  }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.find(), 120);
  }

  onKey(event) {
    if (event.key === "Enter") {
      clearTimeout(this.timer);
      if (this.asked !== this.input.value) this.find();
      this.go(event.shiftKey ? -1 : 1);
    } else if (event.key === "Escape") this.clear();
  }

  clear() {
    this.input.value = "";
    this.find();
  }

  /** Bring out what is asked for, and count it; a rank that is named is shown. */
  find() {
    this.asked = this.input.value;
    this.hits = [];
    this.at = -1;
    let count = 0;
    for (const timeline of this.timelines) {
      const wanted = wantedBy(timeline.run, this.asked);
      const tile = timeline.run.tileOf[/\brank[ :=]*(\d+)/i.exec(this.asked)?.[1]];
      if (tile !== undefined) timeline.showReplica(tile);
      count += timeline.bringOut(wanted);
      if (wanted) this.hits.push(...hitsOf(timeline));
    }
    this.hits.sort((a, b) => a.start - b.start);
    this.count.textContent = this.asked.trim() ? (count ? `${whole(count)} ops` : "none") : "";
  }

  /** Show the next match that is not seen as one with the last, or the one before. */
  go(by) {
    if (!this.hits.length) return;
    this.at = (this.at + by + this.hits.length) % this.hits.length;
    const hit = this.hits[this.at];
    const { timeline, place, i } = hit;
    const { view } = this;
    const length = Math.min(view.to - view.from, Math.max(40 * (hit.end - hit.start), view.least));
    const middle = (hit.start + hit.end) / 2;
    view.show(middle - length / 2, middle + length / 2);
    const row = timeline.rows.of(place, timeline.rows.tile);
    const lane = row.lanes.find((l) =>
      l.tracks.includes(timeline.run.columns.track[row.sheet.from + i]),
    );
    view.chosen = lane ? { timeline, row, lane, i } : null;
    timeline.redraw();
    this.count.textContent = `${whole(this.at + 1)} of ${whole(this.hits.length)}`;
  }
}

/** Return where the ops that a timeline brings out lie, on the replica that it shows. */
function hitsOf(timeline) {
  const { run, rows, painter } = timeline;
  const hits = [];
  for (const [place, found] of painter.mask) {
    const sheet = run.sheetAt(place, rows.tile);
    if (!sheet.exact) continue;
    for (const i of found)
      hits.push({ timeline, place, i, start: sheet.start[i], end: sheet.end[i] });
  }
  return hits;
}
