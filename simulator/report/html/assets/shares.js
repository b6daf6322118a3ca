"use strict";
// How much of a pixel's time each kind of op takes: what is drawn where ops are too many to see.

const FEW = 4; // ops a pixel up to which ops themselves are summed
const FINEST = 4096; // pieces of a lane's time at most

/**
 * Return shares[kind][pixel] of the time of each of `width` pixels between two moments.
 *
 * Ops are summed one by one where they are few; else differences of running sums at the edges of
 * fine pieces of time are taken, which cost the same whatever the number of ops.
 */
function sharesOf(run, sheet, tracks, from, to, width) {
  if (!sheet.exact) return sharesOfPieces(run, sheet, tracks, from, to, width);
  const visible = tracks.map((track) => visibleOps(run, sheet, track, from, to));
  const count = visible.reduce((sum, [low, high]) => sum + high - low, 0);
  if (count > FEW * width) return fromSums(sumsOf(run, sheet, tracks), from, to, width);
  const shares = new Map();
  const scale = width / (to - from);
  for (const [low, high] of visible)
    for (let i = low; i < high; i++) {
      const kind = run.columns.kind[sheet.from + i];
      if (!shares.has(kind)) shares.set(kind, new Float32Array(width));
      fill(shares.get(kind), (sheet.start[i] - from) * scale, (sheet.end[i] - from) * scale);
    }
  return shares;
}

/** Add a span of pixels to shares, cut to their ends. */
function fill(share, begin, end) {
  const width = share.length;
  begin = Math.max(begin, 0);
  end = Math.min(end, width);
  if (end <= begin) return;
  const first = Math.floor(begin);
  const last = Math.min(Math.floor(end), width - 1);
  if (first === last) share[first] += end - begin;
  else {
    share[first] += first + 1 - begin;
    for (let x = first + 1; x < last; x++) share[x] += 1;
    share[last] += end - last;
  }
}

/** Return [low, high): which ops of a track lie between two moments. */
function visibleOps(run, sheet, track, from, to) {
  const [low, high] = run.spanOfTrack(sheet, track);
  return [above(sheet.end, from, low, high), above(sheet.start, to, low, high)];
}

/** Return running sums of the time of each kind at the edges of equal pieces, made once a lane. */
function sumsOf(run, sheet, tracks) {
  const key = tracks.join();
  if (sheet.lods.has(key)) return sheet.lods.get(key);
  const spans = tracks.map((track) => run.spanOfTrack(sheet, track));
  const count = spans.reduce((sum, [low, high]) => sum + high - low, 0);
  const pieces = Math.min(FINEST, Math.max(64, Math.ceil(count / FEW)));
  const [begin, end] = [-run.begin, run.about.makespan - run.begin];
  const scale = pieces / Math.max(end - begin, 1);
  const sums = new Map();
  for (const [low, high] of spans)
    for (let i = low; i < high; i++) {
      const kind = run.columns.kind[sheet.from + i];
      if (!sums.has(kind)) sums.set(kind, new Float32Array(pieces));
      fill(sums.get(kind), (sheet.start[i] - begin) * scale, (sheet.end[i] - begin) * scale);
    }
  const made = { begin, scale, sums: new Map() };
  for (const [kind, share] of sums) made.sums.set(kind, runningSum(share));
  sheet.lods.set(key, made);
  return made;
}

function runningSum(share) {
  const sum = new Float64Array(share.length + 1);
  for (let i = 0; i < share.length; i++) sum[i + 1] = sum[i] + share[i];
  return sum;
}

/** Return shares of pixels as differences of running sums, linear within a piece. */
function fromSums({ begin, scale, sums }, from, to, width) {
  const shares = new Map();
  const step = ((to - from) / width) * scale;
  for (const [kind, sum] of sums) {
    const share = new Float32Array(width);
    const most = sum.length - 1;
    const at = (moment) => {
      if (moment <= 0) return 0;
      if (moment >= most) return sum[most];
      const whole = Math.floor(moment);
      return sum[whole] + (moment - whole) * (sum[whole + 1] - sum[whole]);
    };
    let before = at((from - begin) * scale);
    for (let x = 0; x < width; x++) {
      const now = at((from - begin) * scale + (x + 1) * step);
      share[x] = (now - before) / step;
      before = now;
    }
    shares.set(kind, share);
  }
  return shares;
}

/** Return shares of a sheet of which the page has sums alone. */
function sharesOfPieces(run, sheet, tracks, from, to, width) {
  const lane = run.lanes.find((l) => l.tracks.some((track) => tracks.includes(track)));
  if (!sheet.lods.has(lane.name)) {
    const pieces = run.about.densityBins;
    const sums = new Map();
    run.kinds.forEach((name, kind) => {
      if ((WORK.has(name) ? "compute" : name) !== lane.name) return;
      const share = Float32Array.from(sheet.density.subarray(kind * pieces, (kind + 1) * pieces));
      sums.set(kind, runningSum(share.map((value) => value / 255)));
    });
    const scale = pieces / Math.max(run.about.makespan, 1);
    sheet.lods.set(lane.name, { begin: -run.begin, scale, sums });
  }
  return fromSums(sheet.lods.get(lane.name), from, to, width);
}
