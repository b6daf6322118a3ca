"use strict";
// The axis of time above the rows, shared by the timeline and its overview.

/** Return the moments to label between two others, with their texts. */
function timeMarks(from, to, room) {
  const step = niceStep(to - from, room / 90);
  const [scale, unit] = [
    [SECOND, "s"],
    [SECOND / 1e3, "ms"],
    [SECOND / 1e6, "us"],
    [SECOND / 1e9, "ns"],
  ].find(([size]) => step * 5 >= size) ?? [1, "ps"];
  const places = Math.max(0, Math.ceil(-Math.log10(step / scale) - 1e-9));
  const marks = [];
  for (let k = Math.ceil(from / step); k * step <= to; k++) {
    const text = k === 0 ? "0" : `${((k * step) / scale).toFixed(places)} ${unit}`;
    marks.push([k * step, text]);
  }
  return marks;
}

/** Draw an axis and the lines below it. */
function paintAxis(context, colours, view, { left, width, height, below }) {
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "left";
  for (const [moment, text] of timeMarks(view.from, view.to, width)) {
    const x = Math.round(left + ((moment - view.from) / (view.to - view.from)) * width) + 0.5;
    context.fillStyle = colours.line;
    context.fillRect(x - 0.5, height - 6, 1, 6 + below);
    context.fillStyle = colours.faint;
    if (x + context.measureText(text).width + 6 < left + width)
      context.fillText(text, x + 4, height / 2);
  }
  context.fillStyle = colours.line;
  context.fillRect(left, height - 1, width, 1);
}

/** Fit a canvas to its place on the page and the screen's pixels; return its context. */
function fitted(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
