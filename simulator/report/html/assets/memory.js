"use strict";
// Memory of a rank over time, by what fills it (uPlot draws it).

const GB = 1e9;

class MemoryChart {
  /** @param group all charts of memory on the page: they share one scale. */
  constructor(run, view, colours, group) {
    Object.assign(this, { run, view, colours, group });
    const { memory } = run.about;
    this.choice = element(
      "select",
      { "aria-label": "Rank", onchange: () => this.build() },
      memory.map((of, k) =>
        element(
          "option",
          { value: k },
          `${of.name}${k === 0 && run.about.sized ? " (fullest)" : ""}: peak ${of.peak}`,
        ),
      ),
    );
    this.whole = element("input", { type: "checkbox", onchange: () => this.build() });
    this.place = element("div", { class: "chart" });
    const scale = element("label", { class: "group" }, this.whole, "up to the device's capacity");
    this.element = element(
      "div",
      { class: "memory" },
      element("div", { class: "toolbar" }, this.choice, run.about.sized ? scale : null),
      this.place,
    );
    view.on("time", () => this.follow());
    new ResizeObserver(() => this.resize()).observe(this.place);
  }

  /** Draw the rank that is chosen. */
  build() {
    const { run, colours } = this;
    if (!run.about.memory.length) return;
    const number = Number(this.choice.value);
    const { parts } = run.about.memory[number];
    const unit = run.about.sized ? GB : 1;
    const x = Array.from(run.columns[`memory${number}`], (ticks) => ticks / SECOND);
    const held = parts.map((part) =>
      Array.from(run.columns[`memory${number}.${part}`], (value) => value / unit),
    );
    const sums = [];
    held.forEach((values, k) =>
      sums.push(values.map((value, i) => value + (k ? sums[k - 1][i] : 0))),
    );
    // The tallest sum is drawn first, so that each part shows between its own sum and the next.
    const series = parts
      .map((part, k) => ({
        label: part,
        stroke: colours.of(part),
        fill: colours.of(part),
        width: 0,
        points: { show: false },
        paths: uPlot.paths.stepped({ align: 1 }),
        value: (_, __, ___, i) => (i === null ? "–" : `${digits(held[k][i] ?? 0)}`),
      }))
      .reverse();
    const axis = {
      stroke: colours.faint,
      grid: { stroke: colours.line, width: 1 },
      ticks: { stroke: colours.line },
      font: "11px system-ui",
    };
    this.plot?.destroy();
    const peak = Math.max(...(sums[sums.length - 1] ?? [1]));
    const room = run.about.capacity / unit;
    this.top = 1.06 * (this.whole.checked || peak > 0.5 * room ? Math.max(peak, room) : peak);
    const tops = () => [0, Math.max(...this.group.map((chart) => chart.top ?? 0))];
    this.plot = new uPlot(
      {
        width: this.place.clientWidth || 600,
        height: 240,
        ms: 1e-3,
        cursor: { drag: { x: true, y: false }, points: { show: false } },
        scales: { x: { time: false, range: (_, low, high) => [low, high] }, y: { range: tops } },
        axes: [
          { ...axis, values: (_, values) => axisTexts(values), space: 80 },
          {
            ...axis,
            size: 56,
            label: run.about.sized ? "GB" : "microbatches",
            labelSize: 16,
            labelFont: "11px system-ui",
          },
        ],
        series: [
          { label: "time", value: (_, value) => (value === null ? "–" : duration(value * SECOND)) },
          ...series,
        ],
        hooks: {
          draw: [(plot) => drawCapacity(plot, room, colours)],
          setScale: [(plot, key) => key === "x" && this.onScale(plot)],
        },
      },
      [x, ...sums.reverse()],
      this.place,
    );
    for (const chart of this.group) chart.follow();
  }

  /** Show what the timeline shows, where memory is known. */
  follow() {
    if (!this.plot || this.busy) return;
    this.busy = true;
    this.plot.batch(() => {
      this.plot.setScale("x", { min: this.view.from / SECOND, max: this.view.to / SECOND });
      this.plot.setScale("y", { min: null, max: null });
    });
    this.busy = false;
  }

  onScale(plot) {
    if (this.busy || !this.plot) return;
    this.busy = true;
    this.view.show(plot.scales.x.min * SECOND, plot.scales.x.max * SECOND);
    this.busy = false;
  }

  resize() {
    if (this.plot && this.place.clientWidth)
      this.plot.setSize({ width: this.place.clientWidth, height: 240 });
  }
}

function drawCapacity(plot, room, colours) {
  if (!room) return;
  const { ctx, bbox } = plot;
  const y = plot.valToPos(room, "y", true);
  if (y < bbox.top) return;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colours.dark ? "#ff6b81" : colours.of("capacity");
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.font = `${11 * devicePixelRatio}px system-ui`;
  ctx.textAlign = "right";
  ctx.fillText(
    `capacity ${digits(room)} GB`,
    bbox.left + bbox.width - 4,
    y + 14 * devicePixelRatio,
  );
  ctx.restore();
}

/** Return the labels of an axis of seconds, all in one unit. */
function axisTexts(values) {
  const most = Math.max(...values.map(Math.abs));
  const [scale, unit] = [
    [1, "s"],
    [1e-3, "ms"],
    [1e-6, "us"],
  ].find(([size]) => most >= size) ?? [1e-9, "ns"];
  return values.map((value) => (value === 0 ? "0" : `${digits(value / scale)} ${unit}`));
}
