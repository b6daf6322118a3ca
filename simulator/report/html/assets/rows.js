"use strict";
// Rows of a timeline: one a place of the pipeline, or one a rank, with their lanes and heights.

const MANY = 16; // ranks above which one of each stage is shown first
const ROOM = 420; // pixels that a few rows share
const LANE = 5; // height of a lane of communication where it shares a row
const GAP = 8;
const APART = 6; // between the ranks of one stage and those of the next
const STREAM = 10; // height of a lane of one stream
const SCREEN = 900; // pixels that rows of many ranks take, a pixel each at least

class Rows {
  constructor(run, view) {
    this.run = run;
    this.view = view;
    this.tile = 0; // replica that rows of places show
    this.ranks = run.about.ranks <= MANY;
    this.open = new Set(); // places whose ranks are shown below them
    this.build();
  }

  /** Lay out all rows from the top. */
  build() {
    const { run } = this;
    this.list = [];
    const few = this.ranks ? run.about.ranks : run.numPlaces;
    this.high = Math.min(Math.max(Math.round(ROOM / few) - 6 * run.lanes.length - GAP, 18), 34);
    let y = 0;
    const add = (place, tile, isPlace) => {
      const compact = !isPlace && run.about.ranks > 32;
      const lanes = this.lanesOf(compact);
      const last = lanes[lanes.length - 1];
      const below = compact ? Math.min(Math.floor(last.height / 5), 2) : GAP;
      const height = last ? last.y + last.height + below : 12;
      const rank = run.rankAt(place, tile);
      this.list.push({
        place,
        tile,
        rank,
        isPlace,
        compact,
        lanes,
        y,
        height,
        sheet: run.sheetAt(place, tile),
      });
      y += height;
    };
    for (let place = 0; place < run.numPlaces; place++) {
      if (!this.ranks) add(place, Math.min(this.tile, run.numTiles - 1), true);
      if (this.ranks && place > 0 && run.about.ranks > 32) y += APART;
      if (this.ranks || this.open.has(place))
        for (let tile = 0; tile < run.numTiles; tile++) add(place, tile, false);
    }
    this.height = y;
    this.tops = Float64Array.from(this.list, (row) => row.y);
  }

  /** Return the lanes of a row: where each lies, and the tracks that it shows. */
  lanesOf(compact) {
    const { run, view } = this;
    const shown = run.lanes.filter((lane) => !this.isHidden(lane));
    if (compact) {
      const height = Math.min(Math.max(Math.floor(SCREEN / run.about.ranks), 1), 14);
      return [
        { name: "all", y: 0, height, tracks: shown.flatMap((lane) => lane.tracks), parts: shown },
      ];
    }
    let y = 3;
    const out = [];
    const put = (name, tracks, height) => {
      out.push({ name, tracks, y, height });
      y += height + 1;
    };
    for (const lane of shown) {
      if (lane.name === "compute") put(lane.name, lane.tracks, this.high);
      else if (view.everyStream) for (const track of lane.tracks) put(lane.name, [track], STREAM);
      else put(lane.name, lane.tracks, LANE);
    }
    return out;
  }

  /** Return whether nothing of a lane is to be seen. */
  isHidden(lane) {
    const kinds = lane.name === "compute" ? this.run.kinds.filter((k) => WORK.has(k)) : [lane.name];
    return kinds.every((kind) => this.view.hidden.has(kind));
  }

  /** Return the row at a height, or undefined. */
  at(y) {
    const row = this.list[above(this.tops, y) - 1];
    return row && y < row.y + row.height ? row : undefined;
  }

  /** Return the row that shows a place, of a tile where ranks are shown. */
  of(place, tile) {
    return (
      this.list.find((row) => row.place === place && row.tile === tile) ||
      this.list.find((row) => row.place === place)
    );
  }

  /** Return what a row is called, and what more there is to say. */
  name(row) {
    const { run } = this;
    const place = run.about.places[row.place].name;
    if (!row.isPlace) return [`rank ${row.rank}`, run.numPlaces > 1 ? place : ""];
    const others = run.numTiles - 1;
    const alike = row.sheet.ranks - 1;
    const more =
      others === 0 ? "" : ` +${others}` + (alike === others ? " alike" : ", times differ");
    return [place, `rank ${row.rank}${more}`];
  }
}
