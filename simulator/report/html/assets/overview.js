"use strict";
// The whole run as shares of all ranks, with the part that the timeline shows in a frame.

const HIGH = 46;

class Overview {
  constructor(timeline) {
    this.timeline = timeline;
    const { view } = timeline;
    this.canvas = element("canvas", {
      class: "overview",
      "aria-label": "The whole run: shares of all ranks by kind",
      role: "img",
    });
    this.element = element("div", { class: "overviewed" }, this.canvas);
    view.on("time", () => this.redraw());
    view.on("look", () => this.repaint());
    new ResizeObserver(() => this.repaint()).observe(this.element);
    this.canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerup", () => {
      this.drag = null;
    });
  }

  /** Draw all anew, as after a kind was hidden. */
  repaint() {
    this.picture = null;
    this.redraw();
  }

  redraw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  get width() {
    return Math.max(60, this.element.clientWidth - this.timeline.left - 1);
  }

  draw() {
    const { view, colours, left } = this.timeline;
    const context = fitted(this.canvas, this.element.clientWidth, HIGH);
    this.picture ??= this.paint(this.width);
    context.drawImage(this.picture, left, 4, this.width, HIGH - 8);
    context.fillStyle = colours.faint;
    context.font = "10.5px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillText("all ranks", 6, HIGH / 2);
    const x = (moment) => left + ((moment - view.low) / (view.high - view.low)) * this.width;
    const [a, b] = [x(view.from), x(view.to)];
    context.fillStyle = colours.dark ? "#15171ab0" : "#ffffffb0";
    context.fillRect(left, 0, a - left, HIGH);
    context.fillRect(b, 0, left + this.width - b, HIGH);
    context.strokeStyle = colours.accent;
    context.lineWidth = 2;
    context.strokeRect(a + 1, 2, Math.max(b - a - 2, 2), HIGH - 4);
  }

  /** Return a picture of the mean over ranks, work stacked from below. */
  paint(width) {
    const { run, view, colours } = this.timeline;
    const wide = Math.round(width);
    const canvas = new OffscreenCanvas(wide, HIGH);
    const context = canvas.getContext("2d");
    context.fillStyle = colours.idle;
    context.fillRect(0, 0, wide, HIGH);
    const compute = run.lanes.find((lane) => lane.name === "compute");
    if (!compute) return canvas;
    const totals = new Map();
    for (const sheet of sampled(run.sheets))
      for (const [kind, share] of sharesOf(run, sheet, compute.tracks, view.low, view.high, wide)) {
        if (view.hidden.has(run.kinds[kind])) continue;
        if (!totals.has(kind)) totals.set(kind, new Float32Array(wide));
        const total = totals.get(kind);
        for (let x = 0; x < wide; x++) total[x] += share[x] * sheet.ranks;
      }
    const ranks = sampled(run.sheets).reduce((sum, sheet) => sum + sheet.ranks, 0);
    const base = new Float32Array(wide);
    for (const [kind, total] of [...totals].sort((p, q) => p[0] - q[0])) {
      context.fillStyle = colours.of(run.kinds[kind]);
      for (let x = 0; x < wide; x++) {
        const high = Math.min((total[x] / ranks) * HIGH, HIGH - base[x]);
        context.fillRect(x, HIGH - base[x] - high, 1, high);
        base[x] += high;
      }
    }
    return canvas;
  }

  onDown(event) {
    const { view } = this.timeline;
    const moment = this.moment(event);
    this.canvas.setPointerCapture(event.pointerId);
    const length = view.to - view.from;
    if (moment < view.from || moment > view.to) view.show(moment - length / 2, moment + length / 2);
    this.drag = { moment, from: view.from, to: view.to };
  }

  onMove(event) {
    if (!this.drag) return;
    const by = this.moment(event) - this.drag.moment;
    this.timeline.view.show(this.drag.from + by, this.drag.to + by);
  }

  moment(event) {
    const { view, left } = this.timeline;
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    return view.low + ((x - left) / this.width) * (view.high - view.low);
  }
}

/** Return at most 128 of some sheets, evenly spaced. */
function sampled(sheets) {
  if (sheets.length <= 128) return sheets;
  return Array.from({ length: 128 }, (_, k) => sheets[Math.floor((k * sheets.length) / 128)]);
}
