"use strict";
// What the pointer is on, in a few lines beside it.

/** Show what a timeline has at a point, or hide the tip where that is nothing. */
function showTip(timeline, hover, at) {
  const { tip } = timeline;
  const lines = hover?.lane ? describe(timeline, hover, at) : null;
  tip.hidden = !lines;
  if (!lines) return;
  const [head, ...rest] = lines;
  tip.replaceChildren(
    element("strong", {}, head),
    ...rest.map((line) => element("span", {}, line)),
  );
  const room = timeline.element.clientWidth;
  const wide = tip.offsetWidth;
  tip.style.left = `${at.x + wide + 24 > room ? Math.max(4, at.x - wide - 14) : at.x + 14}px`;
  tip.style.top = `${Math.max(AXIS, Math.min(at.y + 16, timeline.height - tip.offsetHeight - 4))}px`;
}

/** Return the lines that describe an op, or the shares of the time at a pixel. */
function describe(timeline, { row, lane, i }, at) {
  const { run } = timeline;
  if (i !== undefined) {
    const facts = opFacts(run, row, i);
    if (facts.stream === "compute") delete facts.stream;
    const said = ["rank", "stream", "microbatch", "layer", "takes", "starts", "payload"];
    return [
      facts.op,
      ...said.filter((name) => facts[name]).map((name) => `${name} ${facts[name]}`),
    ];
  }
  return densityFacts(timeline, row, lane, at);
}

/** Return what is known of an op, by name, in words. */
function opFacts(run, row, i) {
  const { columns, about } = run;
  const { sheet } = row;
  const at = sheet.from + i;
  const number = (name) => (columns[name][at] === NONE ? null : String(columns[name][at]));
  const cost = about.costs[columns.cost[at]];
  const joint = columns.members[at];
  return {
    op: run.label(at),
    kind: run.kinds[columns.kind[at]],
    rank: String(row.rank),
    stage: number("stage"),
    microbatch: number("microbatch"),
    layer: number("layer"),
    step: about.steps > 1 ? number("step") : null,
    stream: run.tracks[columns.track[at]],
    what: cost.name,
    starts: `at ${duration(sheet.start[i])}`,
    ends: duration(sheet.end[i]),
    takes: duration(sheet.end[i] - sheet.start[i]),
    waited: joint ? `${duration(sheet.wait[i])} for the other${joint > 2 ? "s" : ""}` : null,
    group: joint ? `${whole(joint)} ranks` : null,
    payload: cost.bytes ? amount(cost.bytes, "B") : null,
    computes: cost.flops ? amount(cost.flops, "FLOP") : null,
    traffic: cost.moved ? amount(cost.moved, "B") : null,
  };
}

/** Return the shares of kinds in the time at a pixel of a lane. */
function densityFacts(timeline, row, lane, at) {
  const { run, view } = timeline;
  const pixel = (view.to - view.from) / timeline.width;
  const [from, to] = [timeline.moment(at.x - 1), timeline.moment(at.x + 2)];
  const parts = [];
  for (const part of lane.parts ?? [lane])
    for (const [kind, share] of sharesOf(run, row.sheet, part.tracks, from, to, 1))
      if (share[0] >= 0.005) parts.push(`${run.kinds[kind]} ${percent(Math.min(share[0], 1))}`);
  const head = `${lane.name === "all" ? `rank ${row.rank}` : lane.name}, ${duration(3 * pixel)} here`;
  if (!parts.length) return lane.name === "compute" || lane.name === "all" ? [head, "idle"] : null;
  return [
    head,
    ...parts,
    row.sheet.exact ? "zoom in to see ops" : "kept as sums of pieces, not op by op",
  ];
}
