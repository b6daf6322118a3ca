"use strict";
// What is seen: the range of time, which kinds are hidden, what is selected. Charts listen to it.

class View {
  /** @param runs all runs of the page: they share one axis, from the begin of each last step. */
  constructor(runs) {
    this.runs = runs;
    this.low = Math.min(...runs.map((run) => -run.begin));
    this.high = Math.max(...runs.map((run) => run.about.makespan - run.begin));
    this.home = [0, Math.max(...runs.map((run) => run.end - run.begin))];
    this.least = 1000; // ticks, a nanosecond
    [this.from, this.to] = this.home;
    this.hidden = new Set();
    this.everyStream = false;
    this.range = null; // [from, to] of the selected range
    this.followed = null; // { step, microbatch }
    this.chosen = null; // { timeline, row, lane, i } of the op that is outlined
    this.listeners = { time: [], look: [], range: [], follow: [] };
  }

  on(what, listener) {
    this.listeners[what].push(listener);
  }

  tell(what) {
    for (const listener of this.listeners[what]) listener();
  }

  /** Show a range of time, kept within what there is. */
  show(from, to) {
    const room = this.high - this.low;
    const length = Math.min(Math.max(to - from, this.least), room);
    const middle = (from + to) / 2;
    const begin = Math.min(Math.max(middle - length / 2, this.low), this.high - length);
    if (begin === this.from && begin + length === this.to) return;
    [this.from, this.to] = [begin, begin + length];
    this.tell("time");
  }

  /** Zoom by a factor, a moment staying where it is. */
  zoom(factor, moment = (this.from + this.to) / 2) {
    const length = Math.min(
      Math.max((this.to - this.from) * factor, this.least),
      this.high - this.low,
    );
    const part = (moment - this.from) / (this.to - this.from);
    this.show(moment - part * length, moment - part * length + length);
  }

  /** Move by a share of what is seen. */
  pan(share) {
    const by = share * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  reset() {
    this.show(...this.home);
  }

  select(range) {
    this.range = range && range[1] > range[0] ? range : null;
    this.tell("range");
  }

  follow(followed) {
    this.followed = followed;
    this.tell("follow");
  }

  toggle(kind) {
    if (!this.hidden.delete(kind)) this.hidden.add(kind);
    this.tell("look");
  }
}
