"use strict";
// What is drawn beside and above the rows: names, the selection, what the pointer is on.

/** Write what rows are called left of them; where rows are low, of as many as there is room for. */
function drawNames(timeline, context) {
  const { rows, left, colours, run, scroller, height } = timeline;
  context.save();
  context.beginPath();
  context.rect(0, AXIS, left, height - AXIS);
  context.clip();
  context.textAlign = "left";
  let free = -Infinity;
  for (const row of rows.list) {
    const y = row.y - scroller.scrollTop + AXIS;
    if (y + row.height < AXIS || y > height) continue;
    const middle = y + (row.compact ? Math.max(row.lanes[0].height / 2, 6) : 12);
    if (middle < Math.max(free, AXIS + 6)) continue;
    const [name, more] = rows.name(row);
    const opens = row.isPlace && run.numTiles > 1;
    const x = row.isPlace ? (opens ? 16 : 6) : rows.ranks ? 6 : 22;
    context.fillStyle = row.isPlace || rows.ranks ? colours.ink : colours.faint;
    context.font = `${row.compact ? 10.5 : 12}px system-ui, sans-serif`;
    if (opens) context.fillText(rows.open.has(row.place) ? "▾" : "▸", 3, middle);
    context.fillText(cut(context, name, left - x - 4), x, middle);
    free = middle + (row.compact ? 13 : 0);
    if (!row.compact && timeline.view.everyStream) drawStreams(timeline, context, row, y);
    if (!more) continue;
    context.fillStyle = colours.faint;
    if (row.height >= 32) {
      context.font = "10.5px system-ui, sans-serif";
      context.fillText(cut(context, more, left - x - 4), x, middle + 14);
    } else if (row.compact && rows.ranks && left > 100) context.fillText(more, 74, middle);
  }
  context.restore();
}

/** Write the streams of a row's lanes right before them. */
function drawStreams({ left, colours, run }, context, row, y) {
  context.fillStyle = colours.faint;
  context.font = "9px system-ui, sans-serif";
  context.textAlign = "right";
  for (const lane of row.lanes)
    if (lane.name !== "compute")
      context.fillText(run.tracks[lane.tracks[0]], left - 5, y + lane.y + lane.height / 2);
  context.textAlign = "left";
}

/** Draw the selection, the way of a microbatch, the ops chosen and pointed at, and the moment. */
function drawMarks(timeline, context) {
  const { colours, view, left, width, height, controls } = timeline;
  context.save();
  context.beginPath();
  context.rect(left, 0, width, height);
  context.clip();
  const range = controls.drag?.range ?? view.range;
  if (range) drawRange(timeline, context, range);
  if (view.followed) drawPath(timeline, context);
  if (view.chosen?.timeline === timeline) outline(timeline, context, view.chosen, 2);
  if (controls.hover?.i !== undefined) outline(timeline, context, controls.hover, 1);
  if (controls.pointer?.x > left) {
    context.fillStyle = colours.faint;
    context.fillRect(controls.pointer.x, AXIS - 6, 1, height);
    drawMoment(timeline, context, controls.pointer.x);
  }
  context.restore();
}

/** Shade what is not selected. */
function drawRange(timeline, context, range) {
  const { left, width, height, colours } = timeline;
  const [a, b] = range.map((moment) => timeline.x(moment));
  context.fillStyle = colours.dark ? "#ffffff1f" : "#0000001a";
  context.fillRect(left, AXIS, Math.max(a - left, 0), height);
  context.fillRect(b, AXIS, Math.max(left + width - b, 0), height);
  context.fillStyle = colours.accent;
  context.fillRect(a, 0, b - a, 3);
  context.fillRect(a - 0.5, 0, 1, height);
  context.fillRect(b - 0.5, 0, 1, height);
}

/** Write the moment at a pixel onto the axis. */
function drawMoment(timeline, context, x) {
  const { left, width, colours } = timeline;
  const text = duration(timeline.moment(x));
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  const wide = context.measureText(text).width + 10;
  const at = Math.min(Math.max(x - wide / 2, left), left + width - wide);
  context.fillStyle = colours.ink;
  context.fillRect(at, 4, wide, AXIS - 8);
  context.fillStyle = colours.card;
  context.fillText(text, at + 5, AXIS / 2 + 0.5);
}

/** Draw a line around an op. */
function outline(timeline, context, { row, lane, i }, line) {
  const { rows, left, width, scroller, colours } = timeline;
  const y = row.y + lane.y - scroller.scrollTop + AXIS;
  if (!rows.list.includes(row) || y < AXIS) return;
  const { start, end } = row.sheet;
  const x = Math.max(timeline.x(start[i]), left - 4);
  const wide = Math.max(Math.min(timeline.x(end[i]), left + width + 4) - x, 2);
  context.lineWidth = line;
  context.strokeStyle = colours.ink;
  context.strokeRect(x - 0.5, y - 0.5, wide + 1, lane.height + 1);
}

/** Return a text, cut to a width with an ellipsis. */
function cut(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  while (text.length > 1 && context.measureText(`${text}…`).width > room) text = text.slice(0, -1);
  return `${text}…`;
}
