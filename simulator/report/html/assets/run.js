"use strict";
// One run: its ranks, and the ops of each with their times.

const NONE = -1;

class Run {
  /** @param about what the page says of the run. @param columns its columns, unpacked. */
  constructor(about, columns) {
    this.about = about;
    this.columns = columns;
    [this.begin, this.end] = about.window; // ticks of the last step, the zero of all axes
    this.kinds = about.kinds;
    this.tracks = about.tracks;
    this.numPlaces = about.places.length;
    this.numTiles = columns.tileRanks.length / this.numPlaces;
    this.sheets = this.readSheets();
    this.lanes = this.readLanes();
    this.weigh();
  }

  /** Return every sheet: a place with one set of times, op by op or as shares of pieces of time. */
  readSheets() {
    const { sheets, placeOffset, gap, duration: lasts, track, density, wait } = this.columns;
    const pieces = this.about.densityBins;
    let at = 0;
    const out = [];
    for (let s = 0; s < sheets.length / 2; s++) {
      const place = sheets[2 * s];
      const from = placeOffset[place];
      const count = placeOffset[place + 1] - from;
      const sheet = { place, from, count, exact: s < this.about.exactSheets, ranks: 0 };
      sheet.lods = new Map();
      if (sheet.exact) {
        sheet.start = new Float64Array(count);
        sheet.end = new Float64Array(count);
        sheet.wait = wait.subarray(at, at + count);
        let before = 0;
        for (let i = 0; i < count; i++) {
          if (i > 0 && track[from + i] !== track[from + i - 1]) before = 0;
          const start = before + gap[at + i];
          before = start + lasts[at + i];
          sheet.start[i] = start - this.begin;
          sheet.end[i] = before - this.begin;
        }
        at += count;
      } else {
        const size = this.kinds.length * pieces;
        const first = (s - this.about.exactSheets) * size;
        sheet.density = density.subarray(first, first + size);
      }
      out.push(sheet);
    }
    return out;
  }

  /** Return the lanes of a row: compute, then each kind of communication, with their tracks. */
  readLanes() {
    const { track, kind } = this.columns;
    const kindOfTrack = new Map();
    for (let i = 0; i < track.length; i++)
      if (!kindOfTrack.has(track[i])) kindOfTrack.set(track[i], this.kinds[kind[i]]);
    const lanes = new Map([["compute", { name: "compute", tracks: [] }]]);
    this.tracks.forEach((name, t) => {
      const of = name === "compute" ? "compute" : kindOfTrack.get(t);
      if (!lanes.has(of)) lanes.set(of, { name: of, tracks: [] });
      lanes.get(of).tracks.push(t);
    });
    return [...lanes.values()].filter((lane) => lane.tracks.length);
  }

  /** Count the ranks of each sheet, and note where each rank lies. */
  weigh() {
    const { tileRanks, sheetOf } = this.columns;
    this.placeOf = new Int32Array(this.about.ranks);
    this.tileOf = new Int32Array(this.about.ranks);
    for (let place = 0, i = 0; place < this.numPlaces; place++)
      for (let tile = 0; tile < this.numTiles; tile++, i++) {
        this.sheets[sheetOf[i]].ranks++;
        this.placeOf[tileRanks[i]] = place;
        this.tileOf[tileRanks[i]] = tile;
      }
    this.differ = this.sheets.length > this.numPlaces;
  }

  sheetAt(place, tile) {
    return this.sheets[this.columns.sheetOf[place * this.numTiles + tile]];
  }

  rankAt(place, tile) {
    return this.columns.tileRanks[place * this.numTiles + tile];
  }

  /** Return where the ops of a track begin and end in a sheet. */
  spanOfTrack(sheet, track) {
    sheet.spans ??= new Map();
    if (!sheet.spans.has(track)) {
      const column = this.columns.track.subarray(sheet.from, sheet.from + sheet.count);
      sheet.spans.set(track, [above(column, track - 1), above(column, track)]);
    }
    return sheet.spans.get(track);
  }

  /** Return which chunk of its rank an op belongs to: 0 for the first stage. */
  chunkOf(row, place) {
    const stages = this.about.places[place].stages;
    const stage = this.columns.stage[row];
    return stages.length > 1 && stage !== NONE ? Math.max(stages.indexOf(stage), 0) : 0;
  }

  action(row) {
    return this.about.actions[this.columns.action[row]];
  }

  /** Return a short name of a row of the columns, as `F3` or `all_reduce`. */
  label(row) {
    const { action, microbatch, members, cost } = this.columns;
    const code = this.about.actions[action[row]];
    const number = microbatch[row] === NONE ? "" : String(microbatch[row]);
    if (!this.isMoving(row)) return code + number;
    if (MESSAGES[code]) return MESSAGES[code] + number;
    return this.about.costs[cost[row]].name;
  }

  isMoving(row) {
    return this.columns.members[row] > 0 || !WORK.has(this.kinds[this.columns.kind[row]]);
  }
}

const MESSAGES = { SEND_F: "send F", RECV_F: "recv F", SEND_B: "send B", RECV_B: "recv B" };
const WORK = new Set(["forward", "backward", "I", "W", "optimizer"]);
