"use strict";
// What ranks do in a range of time.

/** Return means over ranks: by kind ticks, exposed ticks, ops; idle ticks; and how many ranks. */
function statistics(run, from, to) {
  const totals = new Map();
  const of = (name) => {
    if (!totals.has(name)) totals.set(name, { busy: 0, exposed: 0, ops: 0, bytes: 0 });
    return totals.get(name);
  };
  let ranks = 0;
  let idle = 0;
  const places = run.about.places.map(() => ({ busy: 0, ranks: 0 }));
  for (const sheet of run.sheets) {
    if (!sheet.exact) continue;
    ranks += sheet.ranks;
    let computing = 0;
    for (const lane of run.lanes) {
      if (lane.name === "compute") {
        computing = addWork(run, sheet, lane, from, to, of);
        idle += (to - from - computing) * sheet.ranks;
      } else addFlows(run, sheet, lane, from, to, of(lane.name));
    }
    places[sheet.place].busy += computing * sheet.ranks;
    places[sheet.place].ranks += sheet.ranks;
  }
  const mean = [...totals].map(([name, total]) => ({
    name,
    busy: total.busy / ranks,
    exposed: total.exposed / ranks,
    ops: total.ops / ranks,
    bytes: total.bytes / ranks,
  }));
  return { kinds: mean.filter((kind) => kind.ops > 0), idle: idle / ranks, ranks, places };
}

/** Add the work of a lane by kind; return the time in which it computes. */
function addWork(run, sheet, lane, from, to, of) {
  let computing = 0;
  for (const track of lane.tracks) {
    const [low, high] = visibleOps(run, sheet, track, from, to);
    for (let i = low; i < high; i++) {
      const time = Math.min(sheet.end[i], to) - Math.max(sheet.start[i], from);
      const total = of(run.kinds[run.columns.kind[sheet.from + i]]);
      total.busy += time * sheet.ranks;
      total.ops += sheet.ranks;
      computing += time;
    }
  }
  return computing;
}

/** Add the time in which flows of a lane move, and how much of it the rank computes nothing. */
function addFlows(run, sheet, lane, from, to, total) {
  const { members, cost } = run.columns;
  const spans = [];
  for (const track of lane.tracks) {
    const [low, high] = visibleOps(run, sheet, track, from, to);
    for (let i = low; i < high; i++) {
      const [a, b] = [Math.max(sheet.start[i], from), Math.min(sheet.end[i], to)];
      spans.push([a, b]);
      total.ops += sheet.ranks;
      const whole = Math.max(sheet.end[i] - sheet.start[i], 1);
      if (members[sheet.from + i])
        total.bytes +=
          (((run.about.costs[cost[sheet.from + i]].bytes ?? 0) * (b - a)) / whole) * sheet.ranks;
    }
  }
  spans.sort((p, q) => p[0] - q[0]);
  const hidden = computedBy(run, sheet);
  let until = from;
  for (const [a, b] of spans) {
    const begin = Math.max(a, until);
    if (b <= begin) continue;
    total.busy += (b - begin) * sheet.ranks;
    total.exposed += (b - begin - (hidden(b) - hidden(begin))) * sheet.ranks;
    until = b;
  }
}

/** Return a function from a moment to the time that a sheet has computed by then. */
function computedBy(run, sheet) {
  if (!sheet.computed) {
    const track = run.lanes.find((lane) => lane.name === "compute").tracks[0];
    const [low, high] = track === undefined ? [0, 0] : run.spanOfTrack(sheet, track);
    const sums = new Float64Array(high - low + 1);
    for (let i = low; i < high; i++)
      sums[i - low + 1] = sums[i - low] + sheet.end[i] - sheet.start[i];
    sheet.computed = { low, high, sums };
  }
  const { low, high, sums } = sheet.computed;
  return (moment) => {
    const k = above(sheet.start, moment, low, high);
    if (k === low) return 0;
    return sums[k - low] - Math.max(sheet.end[k - 1] - moment, 0);
  };
}
