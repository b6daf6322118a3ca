"use strict";
// A microbatch on its way through the stages: what computes it, when, and what it waits for.

/** Return the passes of a microbatch on the ranks of a tile in order of time. */
function passesOf(run, tile, { step, microbatch }) {
  const { columns } = run;
  const passes = new Map();
  for (let place = 0; place < run.numPlaces; place++) {
    const sheet = run.sheetAt(place, tile);
    if (!sheet.exact) continue;
    for (let i = 0; i < sheet.count; i++) {
      const at = sheet.from + i;
      if (columns.microbatch[at] !== microbatch || columns.step[at] !== step || run.isMoving(at))
        continue;
      const key = `${columns.stage[at]} ${run.kinds[columns.kind[at]]} ${place}`;
      const found = passes.get(key);
      if (found) {
        found.start = Math.min(found.start, sheet.start[i]);
        found.end = Math.max(found.end, sheet.end[i]);
        found.busy += sheet.end[i] - sheet.start[i];
      } else {
        passes.set(key, {
          place,
          microbatch,
          stage: columns.stage[at],
          kind: run.kinds[columns.kind[at]],
          action: run.action(at),
          start: sheet.start[i],
          end: sheet.end[i],
          busy: sheet.end[i] - sheet.start[i],
          tile,
        });
      }
    }
  }
  return [...passes.values()].sort((a, b) => a.start - b.start || a.end - b.end);
}

/** Draw the way of the microbatch that is followed: a line from each pass to the next. */
function drawPath(timeline, context) {
  const { rows, colours } = timeline;
  const tile = timeline.followedTile ?? rows.tile;
  const points = [];
  for (const pass of timeline.passes) {
    const row = rows.of(pass.place, tile);
    if (!row || row.lanes.length === 0) continue;
    const lane = row.lanes[0];
    const y = row.y + lane.y + 0.84 * lane.height - timeline.scroller.scrollTop + AXIS;
    points.push([timeline.x(pass.start), timeline.x(pass.end), y]);
  }
  context.lineJoin = "round";
  for (const [colour, line] of [
    [colours.card, 4.5],
    [colours.ink, 1.8],
  ]) {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.beginPath();
    points.forEach(([begin, end, y], k) => {
      if (k === 0) context.moveTo(begin, y);
      else {
        const [, before, high] = points[k - 1];
        const bend = Math.min(Math.max((begin - before) / 2, 6), 60);
        if (high === y) context.lineTo(begin, y);
        else context.bezierCurveTo(before + bend, high, begin - bend, y, begin, y);
      }
      context.lineTo(end, y);
    });
    context.stroke();
  }
  for (const [begin, end, y] of points)
    for (const x of [begin, end]) {
      context.fillStyle = colours.ink;
      context.beginPath();
      context.arc(x, y, 2.6, 0, 7);
      context.fill();
    }
}
