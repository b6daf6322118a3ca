"use strict";
// What the pointer and keys do to a timeline.

const CLICK = 4; // pixels that a pointer may move within a click

class Controls {
  constructor(timeline) {
    this.timeline = timeline;
    this.view = timeline.view;
    this.drag = null; // where a button went down, and what dragging does from there
    this.pointer = null; // where the pointer is
    this.hover = null; // what it is on
    const on = (name, listener, options) =>
      timeline.top.addEventListener(name, (event) => listener(event, this.place(event)), options);
    on("pointermove", (_, at) => this.move(at));
    on("pointerdown", (event, at) => this.down(event, at));
    on("pointerup", (_, at) => this.up(at));
    on("pointercancel", () => this.up(null));
    on("pointerleave", () => this.leave());
    on("wheel", (event, at) => this.wheel(event, at), { passive: false });
    on("dblclick", (event, at) =>
      this.view.zoom(event.shiftKey ? 3 : 1 / 3, timeline.moment(at.x)),
    );
    on("keydown", (event) => this.key(event));
  }

  place(event) {
    const box = this.timeline.top.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  move(at) {
    const { timeline, drag } = this;
    this.pointer = at;
    if (drag) this.dragTo(at);
    this.hover = drag ? null : timeline.under(at);
    showTip(timeline, this.hover, at);
    timeline.top.style.cursor = this.cursor(at);
    timeline.drawTop();
  }

  cursor(at) {
    if (this.drag?.moved && !this.drag.selects) return "grabbing";
    if (at.x < this.timeline.left) return "default";
    if (at.y < AXIS) return "text";
    return this.hover?.i === undefined ? "grab" : "pointer";
  }

  /** Select, or move in time and among rows. */
  dragTo(at) {
    const { timeline, drag, view } = this;
    if (Math.abs(at.x - drag.x) + Math.abs(at.y - drag.y) > CLICK) drag.moved = true;
    if (drag.selects) {
      const ends = [timeline.moment(drag.x), timeline.moment(Math.max(at.x, timeline.left))];
      drag.range = ends.sort((a, b) => a - b);
      timeline.inspector.live(drag.range);
    } else if (drag.moved && drag.from !== undefined) {
      const by = ((at.x - drag.x) / timeline.width) * (view.to - view.from);
      view.show(drag.from - by, drag.to - by);
      timeline.scroller.scrollTop = drag.scroll - (at.y - drag.y);
    }
  }

  down(event, at) {
    if (event.button !== 0) return;
    const { timeline, view } = this;
    timeline.top.setPointerCapture(event.pointerId);
    const inside = at.x >= timeline.left;
    const selects = inside && (at.y < AXIS || event.shiftKey);
    this.drag = { ...at, selects, scroll: timeline.scroller.scrollTop };
    if (inside && !selects) Object.assign(this.drag, { from: view.from, to: view.to });
  }

  up(at) {
    const { drag } = this;
    this.drag = null;
    if (!drag || !at) return;
    if (drag.selects) this.view.select(drag.moved ? drag.range : null);
    else if (!drag.moved) this.click(at);
  }

  /** Open the ranks of a stage by its name, or choose an op. */
  click(at) {
    const { timeline } = this;
    if (at.x >= timeline.left) {
      const found = timeline.under(at);
      timeline.choose(found?.i === undefined ? null : found);
      return;
    }
    const row = timeline.rows.at(at.y - AXIS + timeline.scroller.scrollTop);
    if (row?.isPlace) timeline.open(row.place);
  }

  leave() {
    this.pointer = this.hover = null;
    this.timeline.tip.hidden = true;
    this.timeline.drawTop();
  }

  wheel(event, at) {
    const { view, timeline } = this;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const turned = Math.max(-60, Math.min(60, event.deltaY));
      view.zoom(Math.exp(turned * 0.006), timeline.moment(at.x));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      view.pan((event.deltaX || event.deltaY) / timeline.width);
    } else this.hint();
  }

  /** Say for a moment how to zoom, to those who turn the wheel alone. */
  hint() {
    const { hint } = this.timeline;
    hint.hidden = false;
    clearTimeout(this.hinted);
    this.hinted = setTimeout(() => {
      hint.hidden = true;
    }, 1200);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { view } = this;
    const act = KEYS[event.key];
    if (!act) return;
    event.preventDefault();
    act(view, this.timeline.scroller);
  }
}

const ZOOM = 0.6;
const zoomIn = (view) => view.zoom(ZOOM);
const zoomOut = (view) => view.zoom(1 / ZOOM);
const KEYS = {
  "+": zoomIn,
  "=": zoomIn,
  w: zoomIn,
  "-": zoomOut,
  s: zoomOut,
  ArrowLeft: (view) => view.pan(-0.15),
  a: (view) => view.pan(-0.15),
  ArrowRight: (view) => view.pan(0.15),
  d: (view) => view.pan(0.15),
  ArrowUp: (_, scroller) => scroller.scrollBy(0, -40),
  ArrowDown: (_, scroller) => scroller.scrollBy(0, 40),
  0: (view) => view.reset(),
  Home: (view) => view.reset(),
  r: (view) => view.select([view.from, view.to]),
};
