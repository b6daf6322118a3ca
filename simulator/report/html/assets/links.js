"use strict";
// The busiest links over time: a row a link, dark where it is full.

const LINK = 15; // height of a row

class LinkMap {
  constructor(run, view, colours) {
    Object.assign(this, { run, view, colours });
    this.canvas = element("canvas", {
      role: "img",
      "aria-label": "Use of the busiest links over time",
    });
    this.tip = element("div", { class: "tip", hidden: true });
    this.ramp = element("i");
    this.element = element(
      "div",
      { class: "links" },
      element("p", { class: "faint" }, run.about.links.note),
      element("p", { class: "ramp faint" }, "0", this.ramp, "100% of capacity"),
      this.canvas,
      this.tip,
    );
    view.on("time", () => this.redraw());
    new ResizeObserver(() => this.redraw()).observe(this.element);
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.tip.hidden = true;
    });
  }

  redraw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    const { run, view, colours } = this;
    const { names, mean, bins } = run.about.links;
    const whole = this.element.clientWidth;
    if (!whole) return;
    this.left = Math.min(260, Math.round(whole * 0.34));
    this.width = whole - this.left - 56;
    const context = fitted(this.canvas, whole, AXIS + names.length * LINK + 4);
    paintAxis(context, colours, view, {
      left: this.left,
      width: this.width,
      height: AXIS,
      below: 0,
    });
    const length = run.end - run.begin;
    const ramp = shades(colours.dark);
    this.ramp.style.background = `linear-gradient(90deg, ${ramp.join()})`;
    context.textBaseline = "middle";
    context.fillStyle = colours.faint;
    context.textAlign = "right";
    context.fillText("mean", whole - 6, AXIS / 2);
    names.forEach((name, row) => {
      const y = AXIS + row * LINK;
      context.textAlign = "left";
      context.fillStyle = colours.ink;
      context.font = "11px system-ui, sans-serif";
      context.fillText(cut(context, name, this.left - 12), 4, y + LINK / 2 + 1);
      context.textAlign = "right";
      context.fillText(percent(mean[row]), whole - 6, y + LINK / 2 + 1);
      context.fillStyle = ramp[0];
      context.fillRect(this.left, y + 1, this.width, LINK - 2);
      for (let bin = 0; bin < bins; bin++) {
        const share = run.columns.links[row * bins + bin] / 200;
        const [a, b] = [bin, bin + 1].map((k) => this.x((k / bins) * length));
        if (!share || b < this.left || a > this.left + this.width) continue;
        context.fillStyle = ramp[Math.min(Math.round(share * 20), 20)];
        const x = Math.max(a, this.left);
        context.fillRect(x, y + 1, Math.min(b, this.left + this.width) - x + 0.3, LINK - 2);
      }
    });
  }

  x(moment) {
    return this.left + ((moment - this.view.from) / (this.view.to - this.view.from)) * this.width;
  }

  onMove(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const row = Math.floor((y - AXIS) / LINK);
    const { names, capacity, bytes, peak, mean, bins } = this.run.about.links;
    const moment =
      this.view.from + ((x - this.left) / this.width) * (this.view.to - this.view.from);
    const bin = Math.floor((moment / (this.run.end - this.run.begin)) * bins);
    this.tip.hidden = !(row in names) || x < 0;
    if (this.tip.hidden) return;
    const now =
      x >= this.left && bin >= 0 && bin < bins
        ? [`${percent(this.run.columns.links[row * bins + bin] / 200)} at ${duration(moment)}`]
        : [];
    this.tip.replaceChildren(
      ...[
        element("strong", {}, names[row]),
        ...[
          ...now,
          `mean ${percent(mean[row])}, peak ${percent(peak[row])}`,
          `${bytes[row]} of ${capacity[row]}`,
        ].map((line) => element("span", {}, line)),
      ],
    );
    this.tip.style.left = `${Math.min(x + 14, this.element.clientWidth - this.tip.offsetWidth - 4)}px`;
    this.tip.style.top = `${this.canvas.offsetTop + y + 16}px`;
  }
}

/** Return 21 shades in one hue from no use to full use. */
function shades(dark) {
  const stops = (
    dark
      ? ["#24282e", "#1d4568", "#2f7fb8", "#7cc0ea", "#e6f4fd"]
      : ["#efefef", "#b5d2ea", "#56a0d3", "#0b5a9c", "#061a3a"]
  ).map(channels);
  return Array.from({ length: 21 }, (_, k) => {
    const at = Math.min(k / 5, 3.999);
    const [low, part] = [Math.floor(at), at - Math.floor(at)];
    return `rgb(${stops[low].map((c, i) => Math.round(c + (stops[low + 1][i] - c) * part)).join()})`;
  });
}
