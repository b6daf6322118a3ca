"use strict";
// The answer in a minute: what was simulated, what it takes, what limits it, what differs.

const CATEGORY = {
  tp: "tp exposed",
  pp: "pp exposed",
  dp: "dp exposed",
  cp: "cp exposed",
  ep: "ep exposed",
  tied: "tied embeddings",
  offload: "host copies",
  data: "data wait",
  save: "checkpoint",
  fill: "bubble: fill",
  stall: "bubble: stall",
  drain: "bubble: drain",
};

/** Return the head of a page: names, what was simulated, the verdict, the first numbers. */
function summaryOf(runs, colours) {
  const heads = runs.map((run, k) => headOf(run, runs.length > 1 ? LETTERS[k] : ""));
  return [
    element("div", { class: `heads n${runs.length}` }, heads),
    runs.length === 1 ? tilesOf(runs[0]) : differencesOf(runs),
    section("Where the time goes", "time", timesOf(runs, colours)),
  ];
}

/** Return a section of the page with a heading that can be linked to. */
function section(title, id, ...content) {
  const heading = element("h2", { id: `${id}-title` }, title);
  return element("section", { id, "aria-labelledby": `${id}-title` }, heading, content);
}

function headOf(run, letter) {
  const { name, lines, verdict, owners, about } = run.about;
  const title = [letter ? element("b", { class: "letter" }, letter) : null, name];
  const owned = owners.map(([owner, share]) => `${owner} ${percent(share)}`).join(" · ");
  const bottleneck = [element("b", {}, "Bottleneck "), verdict];
  const shares = element("span", { class: "faint" }, owned);
  return element(
    "div",
    { class: "head" },
    element("h1", {}, title),
    definitions("what", lines),
    verdict ? element("p", { class: "verdict" }, bottleneck, shares) : null,
    about ? aside(about) : null,
  );
}

function tilesOf(run) {
  const tiles = run.about.metrics.map(({ name, text, note }) =>
    element(
      "div",
      { class: "tile" },
      element("span", { class: "label" }, name),
      element("strong", {}, text),
      element("span", { class: "faint" }, note),
    ),
  );
  return element("div", { class: "tiles" }, tiles);
}

/** Return the first numbers of two runs side by side, with the change from one to the other. */
function differencesOf([a, b]) {
  const pairs = a.about.metrics
    .map((one) => [one, b.about.metrics.find(({ name }) => name === one.name)])
    .filter(([, two]) => two);
  const rows = pairs.map(([one, two]) => {
    const { text, mark } = changeOf(one, two);
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, one.name),
      [one, two].map((of) => element("td", {}, of.text, element("small", {}, of.note))),
      element("td", { class: mark }, text, element("small", {}, mark)),
    );
  });
  return tableOf("differences", ["", "A", "B", "B against A"], rows);
}

/** Return the change from one number to another in words, and whether it is better or worse. */
function changeOf(one, two) {
  if (!one.value) return { text: "–", mark: "" };
  const change = two.value / one.value - 1;
  const text = `${change >= 0 ? "+" : "−"}${percent(Math.abs(change))}`;
  const better = one.text === two.text ? 0 : Math.sign(change) * one.better;
  return { text, mark: { 1: "better", "-1": "worse", 0: "" }[better] };
}

/** Return bars of where the time of a step goes, of all ranks and of each place. */
function timesOf(runs, colours) {
  const { categories } = runs[0].about;
  const longest = Math.max(...runs.map((run) => run.about.stepTime));
  const present = categories.filter((_, c) => runs.some((run) => run.about.meanShares[c] > 0));
  const legend = present.map((name) =>
    element("span", {}, swatch(colours.ofCategory(name)), ` ${CATEGORY[name] ?? name}`),
  );
  const out = [element("div", { class: "legend" }, legend)];
  for (const [k, { about }] of runs.entries()) {
    const bar = (label, shares, note, high) =>
      barOf(label, shares, note, high, about.stepTime / longest, categories, colours);
    if (runs.length > 1)
      out.push(bar(`${LETTERS[k]}: all ranks`, about.meanShares, about.metrics[0].text, "thick"));
    else out.push(bar("all ranks", about.meanShares, "% of the step", "thick"));
    if (about.places.length === 1) continue;
    const places = about.places.map((place) => bar(place.name, place.shares, place.memory, "thin"));
    const open = runs.length === 1 && places.length <= 16;
    const title = element("summary", {}, `by ${about.placeWord}, and memory`);
    out.push(element("details", { open }, title, element("div", { class: "places" }, places)));
  }
  return out;
}

/** Return a bar of shares by category, with a name before it and a note after it. */
function barOf(label, shares, note, high, scale, categories, colours) {
  const pieces = categories.map((name, c) => {
    if (shares[c] <= 0) return null;
    const colour = colours.ofCategory(name);
    const style = { flexGrow: shares[c], background: colour, color: inkOn(colour) };
    const roomy = high === "thick" && shares[c] * scale >= 0.045;
    const text = roomy ? (100 * shares[c]).toFixed(1) : "";
    return element("i", { style, title: `${name} ${percent(shares[c])}` }, text);
  });
  return element(
    "div",
    { class: `bar ${high}` },
    element("span", { class: "name" }, label),
    element("div", { class: "stack", style: { width: `${100 * scale}%` } }, pieces),
    element("span", { class: "note faint" }, note),
  );
}

/** Return the table of communication by kind. */
function flowsOf(run, colours) {
  const { flows, flowHead } = run.about;
  if (!flows.length) return aside("No rank communicates.");
  const rows = flows.map(({ axis, cells: [operation, ...cells] }) =>
    rowOf([[swatch(colours.of(axis)), ` ${axis} ${operation}`], ...cells]),
  );
  return element(
    "div",
    { class: "wide" },
    tableOf("flows", flowHead, rows),
    aside(
      "transfer: of a call, from its last member's arrival; wait: of a member until then; ",
      "a rank: all its transfers in a step",
    ),
  );
}

/** Return what was assumed: of two runs first what only one of them assumes. */
function assumptionsOf(runs) {
  const [a, b] = runs.map(({ about }) => [...about.notes, ...about.assumptions]);
  if (!a.length && !b?.length) return aside("Nothing is assumed.");
  if (!b)
    return [listOf("Notes", runs[0].about.notes), listOf("Assumed", runs[0].about.assumptions)];
  const missing = (some) => (text) => !some.includes(text);
  return [
    listOf("Assumed in A alone", a.filter(missing(b))),
    listOf("Assumed in B alone", b.filter(missing(a))),
    listOf(
      "Assumed in both",
      a.filter((text) => b.includes(text)),
    ),
  ];
}

function listOf(title, items) {
  if (!items.length) return [];
  const list = items.map((text) => element("li", {}, text));
  return [element("h3", {}, title), element("ul", {}, list)];
}
