"use strict";
// Draws the rows of a timeline: ops where they can be seen, shares of pixels elsewhere.

const MERGED = 6; // pixels below which touching ops of one action are drawn as one
const NAMED = 110; // pixels from which an op is named in full
const DIM = 0.22; // strength of ops beside those that are brought out
const LEVELS = 12; // strengths of a low lane that are told apart
const LEGIBLE = 8; // pixels from which the height of a share can be read

class Painter {
  constructor(run, view, colours) {
    Object.assign(this, { run, view, colours });
    this.mask = null; // { byPlace: Map place -> sorted rows } of ops to bring out
    this.drawn = 0; // rectangles of the last picture
    this.strips = new Strips(run, view, colours);
  }

  /** Draw rows into a canvas whose plot begins at `left`, `top`, and is `width` wide. */
  paint(context, rows, { left, top, width, height, scroll }) {
    this.context = context;
    this.width = Math.max(1, Math.round(width));
    this.drawn = 0;
    this.strips.begin(this.mask);
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
      const levelAt = (x) =>
        share[x] < 0.004 ? 0 : Math.min(1 + Math.floor(LEVELS * share[x]), LEVELS);
      let level = levelAt(0);
      for (let x = 1, from = 0; x <= width; x++) {
        const next = x < width ? levelAt(x) : -1;
        if (next === level) continue;
        context.globalAlpha = whole * (0.2 + (0.8 * level) / LEVELS);
        if (level) this.rect(colour, from, y, x - from, height);
        [from, level] = [x, next];
      }
    }
    context.globalAlpha = whole;
  }

  /** Draw a compact row as a strip, which rows of one sheet share. */
  paintStrip(row) {
    const [lane] = row.lanes;
    const { picture, from, width } = this.strips.of(row.sheet, lane.parts, this.width);
    this.context.imageSmoothingEnabled = false;
    const y = row.y + lane.y;
    this.context.drawImage(picture, from, 0, width, 1, 0, y, this.width, lane.height);
    this.drawn++;
  }
}
