"use strict";
// The timeline of a run: rows of ranks over time, and what the pointer and keys do to it.

const AXIS = 24; // height of the axis of time
const CLICK = 4; // pixels that a pointer may move within a click

class Timeline {
  constructor(run, view, colours, inspector) {
    Object.assign(this, { run, view, colours, inspector });
    this.rows = new Rows(run, view);
    this.painter = new Painter(run, view, colours);
    this.chosen = null; // { row, i } of the op that was clicked
    this.hover = null;
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
        "zoom, arrows move, 0 shows the step, slash searches, R selects what is seen, Escape clears.",
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
    this.element = element("div", { class: "timeline" }, this.scroller, this.tip);
    const on = (name, listener, options) => this.top.addEventListener(name, listener, options);
    on("pointermove", (event) => this.onMove(event));
    on("pointerdown", (event) => this.onDown(event));
    on("pointerup", (event) => this.onUp(event));
    on("pointercancel", () => {
      this.drag = null;
    });
    on("pointerleave", () => this.onLeave());
    on("wheel", (event) => this.onWheel(event), { passive: false });
    on("dblclick", (event) =>
      this.view.zoom(event.shiftKey ? 3 : 1 / 3, this.moment(this.place(event).x)),
    );
    on("keydown", (event) => this.onKey(event));
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

  place(event) {
    const box = this.top.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
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
    this.drawNames(context);
    this.drawTop();
  }

  /** Write what rows are called left of them; where rows are low, of as many as there is room for. */
  drawNames(context) {
    const { rows, left, colours, run } = this;
    const scroll = this.scroller.scrollTop;
    context.save();
    context.beginPath();
    context.rect(0, AXIS, left, this.height - AXIS);
    context.clip();
    context.textAlign = "left";
    let free = -Infinity;
    for (const row of rows.list) {
      const y = row.y - scroll + AXIS;
      if (y + row.height < AXIS || y > this.height) continue;
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
      if (more && row.height >= 32) {
        context.fillStyle = colours.faint;
        context.font = "10.5px system-ui, sans-serif";
        context.fillText(cut(context, more, left - x - 4), x, middle + 14);
      } else if (more && row.compact && rows.ranks && left > 100) {
        context.fillStyle = colours.faint;
        context.fillText(more, 74, middle);
      }
    }
    context.restore();
  }

  /** Draw what lies above the rows: selection, path of a microbatch, op and moment at the pointer. */
  drawTop() {
    const context = fitted(this.top, this.scroller.clientWidth, this.height);
    const { colours, view, left, width } = this;
    context.save();
    context.beginPath();
    context.rect(left, 0, width, this.height);
    context.clip();
    const range = this.drag?.range ?? view.range;
    if (range) {
      const [a, b] = range.map((moment) => this.x(moment)).sort((p, q) => p - q);
      context.fillStyle = colours.dark ? "#ffffff1f" : "#0000001a";
      context.fillRect(left, AXIS, Math.max(a - left, 0), this.height);
      context.fillRect(b, AXIS, Math.max(left + width - b, 0), this.height);
      context.fillStyle = colours.accent;
      context.fillRect(a, 0, b - a, 3);
      context.fillRect(a - 0.5, 0, 1, this.height);
      context.fillRect(b - 0.5, 0, 1, this.height);
    }
    if (view.followed) drawPath(this, context);
    if (this.chosen) this.outline(context, this.chosen, 2);
    if (this.hover?.i !== undefined) this.outline(context, this.hover, 1);
    if (this.pointer && this.pointer.x > left) {
      context.fillStyle = colours.faint;
      context.fillRect(this.pointer.x, AXIS - 6, 1, this.height);
      this.drawMoment(context);
    }
    context.restore();
  }

  /** Write the moment at the pointer onto the axis. */
  drawMoment(context) {
    const text = duration(this.moment(this.pointer.x));
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const wide = context.measureText(text).width + 10;
    const x = Math.min(
      Math.max(this.pointer.x - wide / 2, this.left),
      this.left + this.width - wide,
    );
    context.fillStyle = this.colours.ink;
    context.fillRect(x, 4, wide, AXIS - 8);
    context.fillStyle = this.colours.card;
    context.fillText(text, x + 5, AXIS / 2 + 0.5);
  }

  outline(context, { row, lane, i }, line) {
    if (!this.rows.list.includes(row) || i === undefined) return;
    const { start, end } = row.sheet;
    const x = Math.max(this.x(start[i]), this.left - 4);
    const wide = Math.max(Math.min(this.x(end[i]), this.left + this.width + 4) - x, 2);
    const y = row.y + lane.y - this.scroller.scrollTop + AXIS;
    if (y < AXIS) return;
    context.lineWidth = line;
    context.strokeStyle = this.colours.ink;
    context.strokeRect(x - 0.5, y - 0.5, wide + 1, lane.height + 1);
  }

  // Pointer and keys

  onMove(event) {
    const at = this.place(event);
    this.pointer = at;
    if (this.drag) {
      const { drag } = this;
      if (Math.abs(at.x - drag.x) + Math.abs(at.y - drag.y) > CLICK) drag.moved = true;
      if (drag.selects) {
        drag.range = [this.moment(drag.x), this.moment(Math.max(at.x, this.left))].sort(
          (a, b) => a - b,
        );
        this.inspector.live(drag.range);
      } else if (drag.moved && drag.from !== undefined) {
        const by = ((at.x - drag.x) / this.width) * (this.view.to - this.view.from);
        this.view.show(drag.from - by, drag.to - by);
        this.scroller.scrollTop = drag.scroll - (at.y - drag.y);
      }
    }
    this.hover = this.drag ? null : this.under(at);
    showTip(this, at);
    this.top.style.cursor =
      at.y < AXIS
        ? "text"
        : at.x < this.left
          ? "default"
          : this.drag?.moved
            ? "grabbing"
            : this.hover?.i !== undefined
              ? "pointer"
              : "grab";
    this.drawTop();
  }

  onDown(event) {
    if (event.button !== 0) return;
    const at = this.place(event);
    this.top.setPointerCapture(event.pointerId);
    const selects = at.x >= this.left && (at.y < AXIS || event.shiftKey);
    this.drag = { ...at, selects, scroll: this.scroller.scrollTop };
    if (at.x >= this.left && !selects)
      Object.assign(this.drag, { from: this.view.from, to: this.view.to });
  }

  onUp(event) {
    const { drag } = this;
    this.drag = null;
    if (!drag) return;
    const at = this.place(event);
    if (drag.selects) this.view.select(drag.moved ? drag.range : null);
    else if (!drag.moved) this.onClick(at);
  }

  onClick(at) {
    if (at.x < this.left) {
      const row = this.rows.at(at.y - AXIS + this.scroller.scrollTop);
      if (row?.isPlace && this.run.numTiles > 1) {
        if (!this.rows.open.delete(row.place)) this.rows.open.add(row.place);
        this.relayout();
      }
      return;
    }
    const found = this.under(at);
    this.choose(found?.i === undefined ? null : found);
  }

  /** Choose an op: it is outlined, described, and its microbatch followed. */
  choose(found) {
    this.chosen = found;
    if (found) this.inspector.op(this, found);
    else this.inspector.clear();
    this.redraw();
  }

  onLeave() {
    this.pointer = this.hover = null;
    this.tip.hidden = true;
    this.drawTop();
  }

  onWheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.view.zoom(
        Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006),
        this.moment(this.place(event).x),
      );
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.view.pan((event.deltaX || event.deltaY) / this.width);
    }
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { view } = this;
    const scroll = (by) => {
      this.scroller.scrollTop += by;
    };
    const keys = {
      "+": () => view.zoom(0.6),
      "=": () => view.zoom(0.6),
      w: () => view.zoom(0.6),
      "-": () => view.zoom(1 / 0.6),
      s: () => view.zoom(1 / 0.6),
      ArrowLeft: () => view.pan(-0.15),
      a: () => view.pan(-0.15),
      ArrowRight: () => view.pan(0.15),
      d: () => view.pan(0.15),
      ArrowUp: () => scroll(-40),
      ArrowDown: () => scroll(40),
      0: () => view.reset(),
      Home: () => view.reset(),
      r: () => view.select([view.from, view.to]),
    };
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  onFollow() {
    const { followed } = this.view;
    this.bringOut(
      followed &&
        ((row) =>
          this.run.columns.microbatch[row] === followed.microbatch &&
          this.run.columns.step[row] === followed.step),
    );
  }

  /** Bring out the ops of which `wanted` is true of their row, or none; return how many there are. */
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

/** Return a text, cut to a width with an ellipsis. */
function cut(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  while (text.length > 1 && context.measureText(`${text}…`).width > room) text = text.slice(0, -1);
  return `${text}…`;
}
