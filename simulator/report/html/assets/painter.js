"use strict";
// Draws the rows of a timeline: ops where they can be seen, shares of pixels elsewhere.

const MERGED = 6; // pixels below which touching ops of one action are drawn as one
const NAMED = 110; // pixels from which an op is named in full
const DIM = 0.22; // strength of ops beside those that are brought out
const LEGIBLE = 8; // pixels from which the height of a share can be read

class Painter {
  constructor(run, view, colours) {
    Object.assign(this, { run, view, colours });
    this.mask = null; // { byPlace: Map place -> sorted rows } of ops to bring out
    this.drawn = 0; // rectangles of the last picture
  }

  /** Draw rows into a canvas whose plot begins at `left`, `top`, and is `width` wide. */
  paint(context, rows, { left, top, width, height, scroll }) {
    this.context = context;
    this.width = Math.max(1, Math.round(width));
    this.strips = new Map();
    this.drawn = 0;
    context.save();
    context.beginPath();
    context.rect(left, top, width, height);
    context.clip();
    context.translate(left, top - scroll);
    for (const row of rows.list) {
      if (row.y + row.height < scroll || row.y > scroll + height) continue;
      if (row.compact) this.paintStrip(row);
      else for (const lane of row.lanes) this.paintLane(row, lane);
    }
    context.restore();
  }

  rect(colour, x, y, width, height) {
    if (this.context.fillStyle !== colour) this.context.fillStyle = colour;
    this.context.fillRect(x, y, width, height);
    this.drawn++;
  }

  /** Draw a lane of a row: its ground, its ops, and those that are brought out above them. */
  paintLane(row, lane) {
    const y = row.y + lane.y;
    const { context, colours, view, run, width } = this;
    if (lane.name === "compute") this.rect(colours.idle, 0, y, width, lane.height);
    else this.rect(colours.line, 0, y + lane.height - 0.5, width, 0.5);
    const dim = this.mask !== null;
    if (dim) context.globalAlpha = DIM;
    const visible = row.sheet.exact
      ? lane.tracks.map((track) => visibleOps(run, row.sheet, track, view.from, view.to))
      : [];
    const count = visible.reduce((sum, [low, high]) => sum + high - low, 0);
    if (!row.sheet.exact || count > FEW * width) {
      const shares = sharesOf(run, row.sheet, lane.tracks, view.from, view.to, width);
      this.paintShares(shares, y, lane.height);
    } else {
      for (const [low, high] of visible) this.paintOps(row, y, lane.height, low, high, null);
    }
    context.globalAlpha = 1;
    if (dim && row.sheet.exact) this.paintMasked(row, lane, y);
  }

  /** Draw the ops of a lane that are brought out, at full strength. */
  paintMasked(row, lane, y) {
    const { run, view } = this;
    for (const track of lane.tracks) {
      const [low, high] = visibleOps(run, row.sheet, track, view.from, view.to);
      const rows = this.mask.get(row.place);
      if (!rows) continue;
      const from = above(rows, low - 1);
      const to = above(rows, high - 1);
      if (to > from) this.paintOps(row, y, lane.height, from, to, rows);
    }
  }

  /**
   * Draw ops low..high of a sheet, or of `some` of them. Touching ones of one action that are
   * narrow are drawn as one; what is narrower than a pixel is summed by pixel.
   */
  paintOps(row, y, height, low, high, some) {
    const { run, view, width } = this;
    const { kind, microbatch, stage } = run.columns;
    const { sheet } = row;
    const scale = width / (view.to - view.from);
    const thin = new Map();
    const least = some ? 1.5 : 1;
    let open = null;
    const close = () => {
      if (open === null) return;
      const wide = open.end - open.begin;
      if (wide >= least || some) this.paintOp(row, open, y, height, Math.max(wide, least));
      else {
        if (!thin.has(open.kind)) thin.set(open.kind, new Float32Array(width));
        fill(thin.get(open.kind), open.begin, open.end);
      }
      open = null;
    };
    for (let k = low; k < high; k++) {
      const i = some ? some[k] : k;
      const at = sheet.from + i;
      if (view.hidden.has(run.kinds[kind[at]])) continue;
      const begin = (sheet.start[i] - view.from) * scale;
      const end = (sheet.end[i] - view.from) * scale;
      if (
        open !== null &&
        begin - open.end < 0.5 &&
        end - begin < MERGED &&
        kind[at] === open.kind &&
        microbatch[at] === open.microbatch &&
        stage[at] === open.stage
      ) {
        open.end = Math.max(open.end, end);
        open.several = true;
        continue;
      }
      close();
      open = {
        begin,
        end,
        at,
        kind: kind[at],
        microbatch: microbatch[at],
        stage: stage[at],
        several: false,
      };
    }
    close();
    if (thin.size) this.paintShares(thin, y, height);
  }

  /** Draw one op or a few as a box, with its name where it fits. */
  paintOp(row, { begin, at, kind, several }, y, height, wide) {
    const { run, context, colours, width } = this;
    const colour = colours.of(run.kinds[kind], run.chunkOf(at, row.place));
    const seam = wide > 3 ? 0.7 : 0;
    const x = Math.max(begin, -2);
    const shown = Math.min(begin + wide, width + 2) - x;
    this.rect(colour, x, y, shown - seam, height);
    if (height < 12 || shown < 14 || context.globalAlpha < 1) return;
    const [number, layer] = [run.columns.microbatch[at], run.columns.layer[at]];
    let text = number === NONE ? "" : String(number); // as papers write it
    if (shown > NAMED) text = run.label(at) + (several || layer === NONE ? "" : ` layer ${layer}`);
    if (!text || context.measureText(text).width + 3 > shown) return;
    context.fillStyle = inkOn(colour);
    context.fillText(text, x + shown / 2, y + height / 2 + 0.5);
  }

  /** Draw shares of pixels: kinds stacked from below, as high as their shares, or as strong. */
  paintShares(shares, y, height) {
    const { run, colours, view, width } = this;
    if (height < LEGIBLE) return this.paintStrength(shares, y, height);
    const base = new Float32Array(width);
    for (const [kind, share] of shares) {
      if (view.hidden.has(run.kinds[kind])) continue;
      const colour = colours.of(run.kinds[kind]);
      for (let x = 0; x < width; x++) {
        if (share[x] < 0.004) continue;
        const high = Math.min(share[x], 1 - base[x]);
        this.rect(colour, x, y + height * (1 - base[x] - high), 1, height * high);
        base[x] += high;
      }
    }
  }

  /** Draw shares in a low lane, where their height could not be read: as strong as they are. */
  paintStrength(shares, y, height) {
    const { run, colours, view, width, context } = this;
    const whole = context.globalAlpha;
    for (const [kind, share] of shares) {
      if (view.hidden.has(run.kinds[kind])) continue;
      const colour = colours.of(run.kinds[kind]);
      for (let x = 0; x < width; x++) {
        if (share[x] < 0.004) continue;
        context.globalAlpha = whole * Math.min(1, 0.2 + 0.8 * share[x]);
        this.rect(colour, x, y, 1, height);
      }
    }
    context.globalAlpha = whole;
  }

  /** Draw a compact row: a pixel is the kind that has most of it, as strong as ranks are busy. */
  paintStrip(row) {
    const [lane] = row.lanes;
    if (!this.strips.has(row.sheet)) this.strips.set(row.sheet, this.strip(row.sheet, lane.parts));
    this.context.imageSmoothingEnabled = false;
    this.context.drawImage(this.strips.get(row.sheet), 0, row.y + lane.y, this.width, lane.height);
    this.drawn++;
  }

  /**
   * Return a picture of a sheet, a pixel high: the kind that has most of a pixel's time, as strong
   * as the rank is busy; communication counts where the rank computes nothing.
   */
  strip(sheet, lanes) {
    const { run, view, colours, width } = this;
    const busy = new Float32Array(width);
    const most = new Float32Array(width);
    const winner = new Int16Array(width).fill(NONE);
    for (const lane of lanes) {
      const shares = sharesOf(run, sheet, lane.tracks, view.from, view.to, width);
      const free = lane.name === "compute" ? null : busy.slice();
      for (const [kind, share] of shares) {
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
    if (this.mask && sheet.exact) this.stripMask(sheet, image.data);
    context.putImageData(image, 0, 0);
    return canvas;
  }

  /** Mark the ops that are brought out in a picture of a sheet. */
  stripMask(sheet, data) {
    const { run, view, colours, width } = this;
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
