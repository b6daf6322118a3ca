"use strict";
// The timeline of a run: rows of ranks over time.

const AXIS = 24; // height of the axis of time

class Timeline {
  constructor(run, view, colours, inspector) {
    Object.assign(this, { run, view, colours, inspector });
    this.rows = new Rows(run, view);
    this.painter = new Painter(run, view, colours);
    this.passes = []; // of the microbatch that is followed
    this.build();
    view.on("time", () => this.redraw());
    view.on("look", () => this.relayout());
    view.on("range", () => this.redraw());
    view.on("follow", () => this.onFollow());
    new ResizeObserver(() => this.redraw()).observe(this.element);
  }

  build() {
    this.base = element("canvas", { "aria-hidden": true });
    this.top = element("canvas", {
      tabindex: 0,
      role: "application",
      class: "plot",
      "aria-label":
        `Timeline of ${this.run.about.name}: ${this.run.about.ranks} ranks. Plus and minus ` +
        "zoom, arrows move, 0 shows the step, slash searches, R selects the view, Escape clears.",
    });
    this.stage = element("div", { class: "stage" }, this.base, this.top);
    this.spacer = element("div");
    this.tip = element("div", { class: "tip", hidden: true });
    this.scroller = element(
      "div",
      { class: "scroller", onscroll: () => this.redraw() },
      this.stage,
      this.spacer,
    );
    this.hint = element("div", { class: "hint", hidden: true }, "Ctrl and the wheel zoom");
    this.element = element("div", { class: "timeline" }, this.scroller, this.tip, this.hint);
    this.controls = new Controls(this);
  }

  // What is where

  get left() {
    return this.element.clientWidth < 640 ? 92 : 148;
  }

  get width() {
    return Math.max(60, this.scroller.clientWidth - this.left - 1);
  }

  moment(x) {
    return this.view.from + ((x - this.left) / this.width) * (this.view.to - this.view.from);
  }

  x(moment) {
    return this.left + ((moment - this.view.from) / (this.view.to - this.view.from)) * this.width;
  }

  /** Return what lies at a point: a row, a lane, and an op where one is found. */
  under({ x, y }) {
    if (x < this.left || y < AXIS) return null;
    const height = y - AXIS + this.scroller.scrollTop;
    const row = this.rows.at(height);
    if (!row) return null;
    const lane = row.lanes.find(
      (l) => height >= row.y + l.y - 1 && height <= row.y + l.y + l.height + 1,
    );
    if (!lane) return { row };
    return { row, lane, i: row.sheet.exact ? this.opAt(row, lane, x) : undefined };
  }

  /** Return the op of a lane nearest to a pixel, within 3 pixels; of several the shortest. */
  opAt(row, lane, x) {
    const { run, view } = this;
    const moment = this.moment(x);
    const reach = (1.5 * (view.to - view.from)) / this.width;
    let best;
    for (const track of lane.tracks) {
      const [low, high] = visibleOps(run, row.sheet, track, moment - reach, moment + reach);
      if (high - low > 40) continue; // more than can be told apart there
      for (let i = low; i < high; i++) {
        if (view.hidden.has(run.kinds[run.columns.kind[row.sheet.from + i]])) continue;
        const { start, end } = row.sheet;
        const off = Math.max(start[i] - moment, moment - end[i], 0);
        if (
          best === undefined ||
          off < best.off ||
          (off === best.off && end[i] - start[i] < best.length)
        )
          best = { i, off, length: end[i] - start[i] };
      }
      if (lane.name === "all" && best) break; // compute comes first in compact rows
    }
    return best?.i;
  }

  // Drawing, once a frame

  /** Let rows of places show the ranks of a replica. */
  showReplica(tile) {
    this.rows.tile = this.followedTile = Math.min(tile, this.run.numTiles - 1);
    if (this.view.followed) this.onFollow();
    this.relayout();
  }

  /** Show or hide the ranks of a place below it. */
  open(place) {
    if (this.run.numTiles === 1) return;
    if (!this.rows.open.delete(place)) this.rows.open.add(place);
    this.relayout();
  }

  relayout() {
    this.rows.build();
    this.redraw();
  }

  redraw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    const { rows, left, colours, view } = this;
    const most = Math.max(220, Math.round(window.innerHeight * 0.62));
    this.height = Math.min(rows.height + AXIS + 4, most);
    this.scroller.style.height = `${this.height}px`;
    this.stage.style.height = `${this.height}px`;
    this.spacer.style.height = `${Math.max(0, rows.height + AXIS + 4 - this.height)}px`;
    const whole = this.scroller.clientWidth;
    const context = fitted(this.base, whole, this.height);
    paintAxis(context, colours, view, {
      left,
      width: this.width,
      height: AXIS,
      below: this.height,
    });
    context.font = "10.5px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    const place = {
      left,
      top: AXIS,
      width: this.width,
      height: this.height - AXIS,
      scroll: this.scroller.scrollTop,
    };
    this.painter.paint(context, rows, place);
    drawNames(this, context);
    this.drawTop();
  }

  /** Draw what changes with the pointer, above the rows. */
  drawTop() {
    drawMarks(this, fitted(this.top, this.scroller.clientWidth, this.height));
  }

  /** Choose an op: it is outlined, described, and its microbatch followed. */
  choose(found) {
    this.view.chosen = found && { ...found, timeline: this };
    if (found) this.inspector.op(this, found);
    else this.inspector.clear();
    this.redraw();
  }

  onFollow() {
    const { followed } = this.view;
    this.passes = followed ? passesOf(this.run, this.followedTile ?? this.rows.tile, followed) : [];
    this.bringOut(
      followed &&
        ((row) =>
          this.run.columns.microbatch[row] === followed.microbatch &&
          this.run.columns.step[row] === followed.step),
    );
  }

  /** Bring out the ops whose row is `wanted`, or none; return how many there are. */
  bringOut(wanted) {
    const { run } = this;
    this.painter.mask = null;
    let count = 0;
    if (wanted) {
      this.painter.mask = new Map();
      const { placeOffset } = run.columns;
      for (let place = 0; place < run.numPlaces; place++) {
        const found = [];
        for (let row = placeOffset[place]; row < placeOffset[place + 1]; row++)
          if (wanted(row, place)) found.push(row - placeOffset[place]);
        this.painter.mask.set(place, found);
        count += found.length;
      }
    }
    this.redraw();
    return count;
  }
}
