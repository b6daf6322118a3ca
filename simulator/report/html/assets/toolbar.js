"use strict";
// Buttons above the timelines: zoom, rows, lanes, and the legend, whose entries hide their kind.

/** Return the toolbar of some timelines. */
function toolbarOf(timelines, view, colours, search) {
  const runs = timelines.map((timeline) => timeline.run);
  const many = runs.some((run) => run.numTiles > 1);
  const rows = choice(
    "Rows",
    [
      [runs[0].about.placeWord, false],
      ["rank", true],
    ],
    timelines[0].rows.ranks,
    (ranks) => {
      for (const timeline of timelines) timeline.rows.ranks = ranks;
      for (const timeline of timelines) timeline.relayout();
    },
  );
  const lanes = choice(
    "Lanes",
    [
      ["kind", false],
      ["stream", true],
    ],
    view.everyStream,
    (every) => {
      view.everyStream = every;
      view.tell("look");
    },
  );
  const button = (text, label, act) =>
    element("button", { onclick: act, "aria-label": label, title: label }, text);
  const steps = [...new Set(runs.map((run) => run.about.steps))];
  const zoom = element(
    "div",
    { class: "group" },
    button("−", "zoom out", () => view.zoom(1 / 0.6)),
    button("+", "zoom in", () => view.zoom(0.6)),
    button("Step", "show the last step (0)", () => view.reset()),
    view.low < 0
      ? button("Run", `show all ${steps.join(" and ")} steps`, () => view.show(view.low, view.high))
      : null,
  );
  return element(
    "div",
    { class: "toolbar" },
    search.element,
    zoom,
    many ? rows : null,
    lanes,
    replicaOf(timelines),
    legendOf(runs, view, colours),
  );
}

/** Return a choice among a few as buttons of which one is pressed. */
function choice(label, options, now, act) {
  const group = element(
    "div",
    { class: "group", role: "group", "aria-label": label },
    element("span", { class: "faint" }, label),
  );
  for (const [text, value] of options)
    group.append(
      element(
        "button",
        {
          "aria-pressed": String(value === now),
          onclick: (event) => {
            for (const other of group.querySelectorAll("button"))
              other.setAttribute("aria-pressed", String(other === event.currentTarget));
            act(value);
          },
        },
        text,
      ),
    );
  return group;
}

/** Return the choice of the replica that rows of stages show, where replicas differ. */
function replicaOf(timelines) {
  const differing = timelines.filter((timeline) => timeline.run.differ);
  if (!differing.length) return null;
  const most = Math.max(...differing.map((timeline) => timeline.run.numTiles)) - 1;
  return element(
    "label",
    { class: "group" },
    element("span", { class: "faint" }, "Replica"),
    element("input", {
      type: "number",
      min: 0,
      max: most,
      value: 0,
      onchange: (event) => {
        const tile = Math.min(Math.max(Math.round(Number(event.target.value)) || 0, 0), most);
        event.target.value = tile;
        for (const timeline of differing) {
          timeline.rows.tile = timeline.followedTile = Math.min(tile, timeline.run.numTiles - 1);
          timeline.relayout();
        }
      },
    }),
  );
}

/** Return the legend: a button a kind, which shows and hides it. */
function legendOf(runs, view, colours) {
  const kinds = [...new Set(runs.flatMap((run) => run.kinds))];
  return element(
    "div",
    { class: "legend chips", role: "group", "aria-label": "Kinds of ops; press to hide" },
    kinds.map((kind) =>
      element(
        "button",
        {
          "aria-pressed": "true",
          "data-kind": kind,
          title: `show or hide ${kind}`,
          onclick: (event) => {
            view.toggle(kind);
            event.currentTarget.setAttribute("aria-pressed", String(!view.hidden.has(kind)));
          },
        },
        element("i", { class: "swatch", style: { background: colours.of(kind) } }),
        KIND_NAMES[kind] ?? kind,
      ),
    ),
  );
}

const KIND_NAMES = {
  I: "input gradient",
  W: "weight gradient",
  tied: "tied embeddings",
  data: "data loading",
  save: "checkpoint",
};
