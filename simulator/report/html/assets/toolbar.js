"use strict";
// Buttons above the timelines: zoom, rows, lanes, and the legend, whose entries hide their kind.

const KIND_NAMES = {
  I: "input gradient",
  W: "weight gradient",
  tied: "tied embeddings",
  data: "data loading",
  save: "checkpoint",
};

/** Return the toolbar of some timelines. */
function toolbarOf(timelines, view, colours, search) {
  const runs = timelines.map((timeline) => timeline.run);
  const bar = element("div", { class: "toolbar" }, search.element, zoomOf(view));
  if (runs.some((run) => run.numTiles > 1)) bar.append(rowsOf(timelines));
  bar.append(lanesOf(view));
  if (runs.some((run) => run.differ)) bar.append(replicaOf(timelines));
  bar.append(legendOf(runs, view, colours));
  return bar;
}

function zoomOf(view) {
  const button = (text, label, onclick) =>
    element("button", { onclick, "aria-label": label, title: label }, text);
  const group = element("div", { class: "group" });
  group.append(button("−", "zoom out", () => view.zoom(1 / ZOOM)));
  group.append(button("+", "zoom in", () => view.zoom(ZOOM)));
  group.append(button("Step", "show the last step", () => view.reset()));
  const all = () => view.show(view.low, view.high);
  if (view.low < 0) group.append(button("Run", "show all steps", all));
  return group;
}

/** Return the choice between a row a place and a row a rank. */
function rowsOf(timelines) {
  const { run } = timelines[0];
  const one = run.numPlaces > 1 ? run.about.placeWord : "one";
  const options = { [one]: false, rank: true };
  return choice("Rows", options, timelines[0].rows.ranks, (ranks) => {
    for (const timeline of timelines) {
      timeline.rows.ranks = ranks;
      timeline.relayout();
    }
  });
}

/** Return the choice between a lane a kind of communication and a lane a stream. */
function lanesOf(view) {
  return choice("Lanes", { kind: false, stream: true }, view.everyStream, (every) => {
    view.everyStream = every;
    view.tell("look");
  });
}

/** Return a choice among a few as buttons of which one is pressed. */
function choice(label, options, now, act) {
  const group = element("div", { class: "group", role: "group", "aria-label": label });
  group.append(element("span", { class: "faint" }, label));
  const buttons = Object.entries(options).map(([text, value]) => {
    const onclick = (event) => {
      for (const button of buttons)
        button.setAttribute("aria-pressed", String(button === event.currentTarget));
      act(value);
    };
    return element("button", { "aria-pressed": String(value === now), onclick }, text);
  });
  group.append(...buttons);
  return group;
}

/** Return the choice of the replica that rows of places show, where replicas differ. */
function replicaOf(timelines) {
  const most = Math.max(...timelines.map((timeline) => timeline.run.numTiles)) - 1;
  const onchange = (event) => {
    const asked = Math.round(Number(event.target.value)) || 0;
    const tile = Math.min(Math.max(asked, 0), most);
    event.target.value = tile;
    for (const timeline of timelines) timeline.showReplica(tile);
  };
  const input = element("input", { type: "number", min: 0, max: most, value: 0, onchange });
  return element(
    "label",
    { class: "group" },
    element("span", { class: "faint" }, "Replica"),
    input,
  );
}

/** Return the legend: a button a kind, which shows and hides it. */
function legendOf(runs, view, colours) {
  const kinds = [...new Set(runs.flatMap((run) => run.kinds))];
  const label = "Kinds of ops; press to hide";
  const chips = kinds.map((kind) => {
    const onclick = (event) => {
      view.toggle(kind);
      event.currentTarget.setAttribute("aria-pressed", String(!view.hidden.has(kind)));
    };
    const name = KIND_NAMES[kind] ?? kind;
    const attributes = { "aria-pressed": "true", "data-kind": kind, title: `show or hide ${name}` };
    return element("button", { ...attributes, onclick }, swatch(colours.of(kind)), name);
  });
  return element("div", { class: "legend chips", role: "group", "aria-label": label }, chips);
}
