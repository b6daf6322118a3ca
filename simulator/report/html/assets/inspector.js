"use strict";
// The panel beside the timeline: an op and its microbatch, a selected range, or how to move.

const FACTS = [
  ["kind", "kind"],
  ["rank", "rank"],
  ["stage", "stage"],
  ["microbatch", "microbatch"],
  ["layer", "layer"],
  ["step", "step"],
  ["what", "cost"],
  ["stream", "stream"],
  ["takes", "takes"],
  ["starts", "starts"],
  ["waited", "waited"],
  ["group", "group"],
  ["payload", "payload"],
  ["computes", "computes"],
  ["traffic", "memory traffic"],
];

const HELP = [
  ["Drag", "move in time"],
  ["Ctrl + wheel", "zoom; also + and −"],
  ["Shift + drag", "select a range; also on the axis"],
  ["Click an op", "follow its microbatch"],
  ["Click a name", "show the ranks of a stage"],
  ["/", "search; F follows what is found"],
  ["R", "select what is seen"],
  ["0", "the whole step"],
  ["Esc", "clear"],
];

class Inspector {
  constructor(view, colours) {
    Object.assign(this, { view, colours });
    this.element = element("aside", {
      class: "inspector",
      "aria-live": "polite",
      "aria-label": "Details",
    });
    this.clear();
    view.on("range", () => this.range(view.range));
  }

  put(title, ...content) {
    this.element.replaceChildren(
      element("h3", {}, title),
      ...content.flat(Infinity).filter(Boolean),
    );
  }

  /** Say how to move, and follow nothing. */
  clear() {
    if (this.view.followed) this.view.follow(null);
    this.put("How to move", definitions("help", HELP));
  }

  // An op

  /** Describe an op and follow its microbatch. */
  op(timeline, { row, i }) {
    const { run } = timeline;
    const facts = opFacts(run, row, i);
    const known = FACTS.filter(([name]) => facts[name]);
    const list = known.map(([name, label]) => [label, facts[name]]);
    const at = row.sheet.from + i;
    const { microbatch, step } = run.columns;
    const followed =
      microbatch[at] === NONE ? null : { step: step[at], microbatch: microbatch[at] };
    timeline.followedTile = row.tile;
    this.put(facts.op, definitions("facts", list), followed && this.journey(timeline, followed));
    this.view.follow(followed);
  }

  /** Follow a microbatch through the stages, without an op of its own. */
  follow(timeline, followed) {
    this.view.chosen = null;
    this.put("", this.journey(timeline, followed));
    this.view.follow(followed);
  }

  /** Return the passes of a microbatch as a table, with ways to the one before and after. */
  journey(timeline, { step, microbatch }) {
    const { run } = timeline;
    const passes = passesOf(run, timeline.followedTile ?? timeline.rows.tile, { step, microbatch });
    if (!passes.length) return aside("no op of it is kept for this replica");
    const length = Math.max(...passes.map((pass) => pass.end)) - passes[0].start;
    const busy = passes.reduce((sum, pass) => sum + pass.busy, 0);
    const to = (by, text, label) => {
      const onclick = () => this.follow(timeline, { step, microbatch: microbatch + by });
      const next = microbatch + by;
      const disabled = next < 0 || next >= run.about.microbatches;
      return element("button", { onclick, disabled, "aria-label": label }, text);
    };
    return [
      element(
        "div",
        { class: "rowed" },
        element("h4", {}, `Microbatch ${microbatch}`),
        to(-1, "‹", "previous microbatch"),
        to(1, "›", "next microbatch"),
      ),
      aside(`${duration(length)} from first to last; computed ${duration(busy)} of them`),
      tableOf("journey", ["pass", "stage", "waits", "computes"], this.passes(passes, length)),
    ];
  }

  /** Return a row for each pass; it shows the pass when it is pressed. */
  passes(passes, length) {
    let until = passes[0].start;
    return passes.map((pass) => {
      const waited = Math.max(pass.start - until, 0);
      until = Math.max(until, pass.end);
      const show = () => this.view.show(pass.start - 0.05 * length, pass.end + 0.05 * length);
      const onkeydown = (event) => event.key === "Enter" && show();
      const name = [swatch(this.colours.of(pass.kind)), ` ${pass.action}${pass.microbatch}`];
      const stage = pass.stage === NONE ? "" : String(pass.stage);
      const cells = [name, stage, waited ? duration(waited) : "–", duration(pass.busy)];
      return rowOf(cells, { tabindex: 0, onclick: show, onkeydown });
    });
  }

  // A range

  /** Show statistics of a range while it is dragged, at most once a frame. */
  live(range) {
    this.dragged = range;
    this.pending ??= requestAnimationFrame(() => {
      this.pending = null;
      this.range(this.dragged);
    });
  }

  /** Show statistics of a range, or how to move where there is none. */
  range(range) {
    if (!range) {
      this.clear();
      return;
    }
    const [from, to] = range;
    const each = this.view.runs.map((run, k) => [
      this.view.runs.length > 1 ? element("h4", {}, `${LETTERS[k]}: ${run.about.name}`) : null,
      this.statistics(run, from, to),
    ]);
    this.put(
      `${duration(to - from)} selected`,
      aside(`from ${duration(from)} to ${duration(to)}`),
      each,
      element("button", { onclick: () => this.view.show(from, to) }, "Zoom to it"),
    );
  }

  /** Return a table of what ranks of a run do in a range, and bars by place. */
  statistics(run, from, to) {
    const { kinds, idle, ranks, places } = statistics(run, from, to);
    const length = to - from;
    const row = (name, colour, busy, exposed) =>
      rowOf([[swatch(colour), ` ${name}`], percent(busy / length), duration(busy), exposed]);
    const present = run.kinds.map((name) => kinds.find((kind) => kind.name === name));
    const rows = present.filter(Boolean).map(({ name, busy, exposed }) => {
      const bare = WORK.has(name) ? "" : percent(busy ? exposed / busy : 0);
      return row(name, this.colours.of(name), busy, bare);
    });
    const works = present.filter((kind) => kind && WORK.has(kind.name)).length;
    rows.splice(works, 0, row("idle", this.colours.idle, idle, ""));
    const all = run.about.ranks;
    const meanOf =
      ranks === all ? `${whole(all)} ranks` : `the ${whole(ranks)} ranks kept op by op`;
    return [
      tableOf("stats", ["", "share", "time", "exposed"], rows),
      places.length > 1 && places.length <= 32 ? barsOf(run, places, length) : null,
      aside(`Mean of ${meanOf}; exposed: of this time, while the rank computes nothing.`),
    ];
  }
}

/** Return a bar for each place: how much of a range its ranks compute. */
function barsOf(run, places, length) {
  const bars = places.map((place, k) => {
    if (!place.ranks) return null;
    const share = place.busy / place.ranks / length;
    const title = `${run.about.places[k].name}: ${percent(share)} computing`;
    return element("span", { title }, element("i", { style: { height: `${100 * share}%` } }));
  });
  return [aside(`computing, by ${run.about.placeWord}`), element("div", { class: "mini" }, bars)];
}
