"use strict";
// Pictures of ranks, a pixel high: what rows show where there are many.

class Strips {
  constructor(run, view, colours) {
    Object.assign(this, { run, view, colours });
    this.seen = new Map(); // of sheets with ops, for what is seen now
    this.whole = new Map(); // of sheets with sums alone, for the whole run
  }

  /** Begin to draw anew, with some ops brought out or none. */
  begin(mask) {
    const { view, colours } = this;
    this.mask = mask;
    this.seen.clear();
    const look = `${[...view.hidden]} ${mask !== null} ${colours.dark}`;
    if (look !== this.look) this.whole.clear();
    this.look = look;
  }

  /** Return a picture of a sheet, and from where to show how much of it. */
  of(sheet, lanes, width) {
    const { run, view } = this;
    if (sheet.exact) {
      if (!this.seen.has(sheet))
        this.seen.set(sheet, this.picture(sheet, lanes, view.from, view.to, width));
      return { picture: this.seen.get(sheet), from: 0, width };
    }
    const { makespan, densityBins } = run.about;
    const [begin, end] = [-run.begin, makespan - run.begin];
    if (!this.whole.has(sheet))
      this.whole.set(sheet, this.picture(sheet, lanes, begin, end, densityBins));
    const scale = densityBins / (end - begin);
    const from = (view.from - begin) * scale;
    return { picture: this.whole.get(sheet), from, width: (view.to - view.from) * scale };
  }

  /**
   * Return a picture of a range of a sheet: each pixel the kind that has most of its time, as
   * strong as the rank is busy; communication counts where the rank computes nothing.
   */
  picture(sheet, lanes, from, to, width) {
    const { run, view, colours } = this;
    const busy = new Float32Array(width);
    const most = new Float32Array(width);
    const winner = new Int16Array(width).fill(NONE);
    for (const lane of lanes) {
      const free = lane.name === "compute" ? null : busy.slice();
      for (const [kind, share] of sharesOf(run, sheet, lane.tracks, from, to, width)) {
        if (view.hidden.has(run.kinds[kind])) continue;
        for (let x = 0; x < width; x++) {
          const part = free ? share[x] * (1 - free[x]) : share[x];
          busy[x] = Math.min(busy[x] + part, 1);
          if (part > most[x]) [most[x], winner[x]] = [part, kind];
        }
      }
    }
    const canvas = new OffscreenCanvas(width, 1);
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, 1);
    const ground = colours.idleChannels;
    const tints = run.kinds.map((kind) => channels(colours.of(kind)));
    for (let x = 0; x < width; x++) {
      const tint = winner[x] === NONE ? ground : tints[winner[x]];
      const strength = busy[x] * (this.mask ? DIM : 1);
      for (let c = 0; c < 3; c++)
        image.data[4 * x + c] = ground[c] + (tint[c] - ground[c]) * strength;
      image.data[4 * x + 3] = 255;
    }
    if (this.mask && sheet.exact) this.bringOut(sheet, image.data, width);
    context.putImageData(image, 0, 0);
    return canvas;
  }

  /** Mark the ops that are brought out in a picture of what is seen. */
  bringOut(sheet, data, width) {
    const { run, view, colours } = this;
    const scale = width / (view.to - view.from);
    for (const i of this.mask.get(sheet.place) ?? []) {
      const kind = run.kinds[run.columns.kind[sheet.from + i]];
      if (sheet.end[i] < view.from || sheet.start[i] > view.to || view.hidden.has(kind)) continue;
      const tint = channels(colours.of(kind));
      const first = Math.max(Math.floor((sheet.start[i] - view.from) * scale), 0);
      const last = Math.min(Math.ceil((sheet.end[i] - view.from) * scale), width);
      for (let x = first; x < last; x++) data.set(tint, 4 * x);
    }
  }
}
