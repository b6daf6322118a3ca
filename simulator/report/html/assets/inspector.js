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
  ["/", "search"],
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
    this.put(
      "How to move",
      element(
        "dl",
        { class: "help" },
        HELP.map(([keys, what]) => [element("dt", {}, keys), element("dd", {}, what)]),
      ),
    );
  }

  // An op

  /** Describe an op and follow its microbatch. */
  op(timeline, { row, i }) {
    const { run } = timeline;
    const facts = opFacts(run, row, i);
    const at = row.sheet.from + i;
    const list = FACTS.filter(([name]) => facts[name]).flatMap(([name, label]) => [
      element("dt", {}, label),
      element("dd", {}, facts[name]),
    ]);
    const microbatch = run.columns.microbatch[at];
    timeline.followedTile = row.tile;
    this.put(
      facts.op,
      element("dl", { class: "facts" }, list),
      microbatch === NONE ? [] : this.journey(timeline, run.columns.step[at], microbatch),
    );
    this.view.follow(microbatch === NONE ? null : { step: run.columns.step[at], microbatch });
  }

  /** Follow a microbatch through the stages, without an op of its own. */
  follow(timeline, step, microbatch) {
    timeline.chosen = null;
    this.put(`Microbatch ${microbatch}`, this.journey(timeline, step, microbatch));
    this.view.follow({ step, microbatch });
  }

  /** Return the passes of a microbatch as a table, with ways to the one before and after. */
  journey(timeline, step, microbatch) {
    const { run } = timeline;
    const passes = passesOf(run, timeline.followedTile ?? timeline.rows.tile, { step, microbatch });
    if (!passes.length)
      return [element("p", { class: "faint" }, "no op of it is kept for this replica")];
    const last = Math.max(...passes.map((pass) => pass.end));
    const whole = last - passes[0].start;
    const busy = passes.reduce((sum, pass) => sum + pass.busy, 0);
    let until = passes[0].start;
    const rows = passes.map((pass) => {
      const waited = Math.max(pass.start - until, 0);
      until = Math.max(until, pass.end);
      return element(
        "tr",
        {
          tabindex: 0,
          onclick: () => this.view.show(pass.start - whole * 0.05, pass.end + whole * 0.05),
        },
        element(
          "td",
          {},
          element("i", { class: "swatch", style: { background: this.colours.of(pass.kind) } }),
          ` ${pass.action}${microbatch}`,
        ),
        element("td", {}, pass.stage === NONE ? "" : String(pass.stage)),
        element("td", {}, waited ? duration(waited) : "–"),
        element("td", {}, duration(pass.busy)),
      );
    });
    const step1 = (by) => this.follow(timeline, step, microbatch + by);
    const most = run.about.microbatches;
    return [
      element(
        "div",
        { class: "rowed" },
        element("h4", {}, `Microbatch ${microbatch}`),
        element(
          "button",
          {
            onclick: () => step1(-1),
            disabled: microbatch < 1,
            "aria-label": "previous microbatch",
          },
          "‹",
        ),
        element(
          "button",
          {
            onclick: () => step1(1),
            disabled: microbatch >= most - 1,
            "aria-label": "next microbatch",
          },
          "›",
        ),
      ),
      element(
        "p",
        { class: "faint" },
        `${duration(whole)} from first to last; computed ${duration(busy)} of them`,
      ),
      element(
        "table",
        { class: "journey" },
        element(
          "thead",
          {},
          element(
            "tr",
            {},
            ["pass", "stage", "waits", "computes"].map((text) =>
              element("th", { scope: "col" }, text),
            ),
          ),
        ),
        element("tbody", {}, rows),
      ),
    ];
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
    if (!range) return this.clear();
    const { runs } = this.view;
    const [from, to] = range;
    this.put(
      `${duration(to - from)} selected`,
      element("p", { class: "faint" }, `from ${duration(from)} to ${duration(to)}`),
      runs.map((run, k) => [
        runs.length > 1 ? element("h4", {}, `${"AB"[k]}: ${run.about.name}`) : null,
        this.statistics(run, from, to),
      ]),
      element("button", { onclick: () => this.view.show(from, to) }, "Zoom to it"),
    );
  }

  statistics(run, from, to) {
    const { kinds, idle, ranks, places } = statistics(run, from, to);
    const length = to - from;
    const row = (name, colour, busy, exposed) =>
      element(
        "tr",
        {},
        element(
          "td",
          {},
          element("i", { class: "swatch", style: { background: colour } }),
          ` ${name}`,
        ),
        element("td", {}, percent(busy / length)),
        element("td", {}, duration(busy)),
        element("td", {}, exposed),
      );
    const ordered = run.kinds
      .map((name) => kinds.find((kind) => kind.name === name))
      .filter(Boolean);
    const body = [
      ...ordered
        .filter(({ name }) => WORK.has(name))
        .map(({ name, busy }) => row(name, this.colours.of(name), busy, "")),
      row("idle", this.colours.idle, idle, ""),
      ...ordered
        .filter(({ name }) => !WORK.has(name))
        .map(({ name, busy, exposed }) =>
          row(name, this.colours.of(name), busy, percent(busy ? exposed / busy : 0)),
        ),
    ];
    const bars =
      places.length > 1 && places.length <= 32
        ? element(
            "div",
            { class: "mini" },
            places.map((place, k) =>
              place.ranks
                ? element(
                    "span",
                    {
                      title: `${run.about.places[k].name}: ${percent(place.busy / place.ranks / length)} computing`,
                    },
                    element("i", {
                      style: { height: `${(100 * place.busy) / place.ranks / length}%` },
                    }),
                  )
                : null,
            ),
          )
        : null;
    return [
      element(
        "table",
        { class: "stats" },
        element(
          "thead",
          {},
          element(
            "tr",
            {},
            ["", "share", "time", "exposed"].map((text) => element("th", { scope: "col" }, text)),
          ),
        ),
        element("tbody", {}, body),
      ),
      bars && element("p", { class: "faint" }, `computing, by ${run.about.placeWord}`),
      bars,
      element(
        "p",
        { class: "faint" },
        (ranks === run.about.ranks
          ? `Mean of ${ranks.toLocaleString("en")} ranks`
          : `Mean of the ${ranks.toLocaleString("en")} of ${run.about.ranks.toLocaleString("en")} ranks kept op by op`) +
          "; exposed: of this time, while the rank computes nothing.",
      ),
    ];
  }
}
