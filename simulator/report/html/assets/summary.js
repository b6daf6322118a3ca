"use strict";
// The answer in a minute: what was simulated, what it takes, what limits it; of two runs, what differs.

/** Return the head of a page: names, what was simulated, the verdict, the first numbers. */
function summaryOf(runs, colours) {
  return [
    element(
      "div",
      { class: `heads n${runs.length}` },
      runs.map((run, k) => headOf(run, runs.length > 1 ? "AB"[k] : "")),
    ),
    runs.length === 1 ? tilesOf(runs[0]) : differencesOf(runs),
    section("Where the time goes", "time", timesOf(runs, colours)),
  ];
}

function headOf(run, letter) {
  const { name, lines, verdict, owners, ranks } = run.about;
  return element(
    "div",
    { class: "head" },
    element("h1", {}, letter ? element("b", { class: "letter" }, letter) : null, name),
    element(
      "dl",
      { class: "what" },
      lines.flatMap(([label, text]) => [element("dt", {}, label), element("dd", {}, text)]),
    ),
    verdict
      ? element(
          "p",
          { class: "verdict" },
          element("b", {}, "Bottleneck "),
          verdict,
          element(
            "span",
            { class: "faint" },
            owners.map(([owner, share]) => `${owner} ${percent(share)}`).join(" · "),
          ),
        )
      : null,
    lines.length ? null : element("p", { class: "faint" }, `${ranks} ranks, stated times`),
  );
}

function tilesOf(run) {
  return element(
    "div",
    { class: "tiles" },
    run.about.metrics.map(({ name, text, note }) =>
      element(
        "div",
        { class: "tile" },
        element("span", { class: "label" }, name),
        element("strong", {}, text),
        element("span", { class: "faint" }, note),
      ),
    ),
  );
}

/** Return the first numbers of two runs side by side, with the change from one to the other. */
function differencesOf([a, b]) {
  const names = a.about.metrics.map(({ name }) => name);
  const rows = names.map((name, k) => {
    const [one, two] = [a.about.metrics[k], b.about.metrics.find((metric) => metric.name === name)];
    if (!two) return null;
    const change = one.value ? two.value / one.value - 1 : null;
    const better = change === null || one.text === two.text ? 0 : Math.sign(change) * one.better;
    const mark = { 1: "better", "-1": "worse", 0: "" }[better];
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, name),
      element("td", {}, one.text, element("small", {}, one.note)),
      element("td", {}, two.text, element("small", {}, two.note)),
      element(
        "td",
        { class: mark },
        change === null ? "–" : `${change >= 0 ? "+" : "−"}${(100 * Math.abs(change)).toFixed(1)}%`,
        element("small", {}, mark),
      ),
    );
  });
  return element(
    "table",
    { class: "differences" },
    element(
      "thead",
      {},
      element(
        "tr",
        {},
        ["", "A", "B", "B against A"].map((text) => element("th", { scope: "col" }, text)),
      ),
    ),
    element("tbody", {}, rows),
  );
}

/** Return bars of where the time of a step goes, of all ranks and of each place. */
function timesOf(runs, colours) {
  const { categories } = runs[0].about;
  const present = categories.filter((_, c) => runs.some((run) => run.about.meanShares[c] > 0));
  const longest = Math.max(...runs.map((run) => run.about.stepTime));
  const colour = (name) =>
    ["fill", "stall", "drain"].includes(name) ? colours.idleOf(name) : colours.of(name);
  const bar = (label, shares, note, high, scale) =>
    element(
      "div",
      { class: `bar ${high}` },
      element("span", { class: "name" }, label),
      element(
        "div",
        { class: "stack", style: { width: `${100 * scale}%` } },
        categories.map((name, c) =>
          shares[c] <= 0
            ? null
            : element(
                "i",
                {
                  style: {
                    flexGrow: shares[c],
                    background: colour(name),
                    color: inkOn(colour(name)),
                  },
                  title: `${name} ${percent(shares[c])}`,
                },
                shares[c] * scale >= 0.045 && high === "thick"
                  ? percent(shares[c]).replace("%", "")
                  : "",
              ),
        ),
      ),
      element("span", { class: "note faint" }, note),
    );
  const out = [
    element(
      "div",
      { class: "legend" },
      present.map((name) =>
        element(
          "span",
          {},
          element("i", { class: "swatch", style: { background: colour(name) } }),
          ` ${CATEGORY[name] ?? name}`,
        ),
      ),
    ),
  ];
  for (const [k, run] of runs.entries()) {
    const { meanShares, places, stepTime, numPlacesShown } = run.about;
    const scale = stepTime / longest;
    out.push(
      bar(
        runs.length > 1 ? `${"AB"[k]}: mean` : "mean of all ranks",
        meanShares,
        runs.length > 1 ? run.about.metrics[0].text : "% of the step",
        "thick",
        scale,
      ),
    );
    if (places.length > 1)
      out.push(
        element(
          "details",
          { open: runs.length === 1 && places.length <= 16 },
          element("summary", {}, `by ${run.about.placeWord}`),
          element(
            "div",
            { class: "places" },
            places.map((place) => bar(place.name, place.shares, place.memory, "thin", scale)),
          ),
        ),
      );
  }
  return out;
}

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

/** Return a section of the page with a heading that can be linked to. */
function section(title, id, ...content) {
  return element(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    element("h2", { id: `${id}-title` }, title),
    ...content.flat(),
  );
}

/** Return the table of communication by kind. */
function flowsOf(run, colours) {
  const { flows, flowHead } = run.about;
  if (!flows.length) return element("p", { class: "faint" }, "No rank communicates.");
  return element(
    "div",
    { class: "wide" },
    element(
      "table",
      { class: "flows" },
      element(
        "thead",
        {},
        element(
          "tr",
          {},
          flowHead.map((text) => element("th", { scope: "col" }, text)),
        ),
      ),
      element(
        "tbody",
        {},
        flows.map(({ axis, cells }) =>
          element(
            "tr",
            {},
            element(
              "td",
              {},
              element("i", { class: "swatch", style: { background: colours.of(axis) } }),
              ` ${axis} ${cells[0]}`,
            ),
            cells.slice(1).map((text) => element("td", {}, text)),
          ),
        ),
      ),
    ),
    element(
      "p",
      { class: "faint" },
      "transfer: of a call, from its last member's arrival; wait: of a member until then; a rank: all its transfers in a step",
    ),
  );
}

/** Return what was assumed: of two runs first what both assume. */
function assumptionsOf(runs) {
  const list = (title, items) =>
    items.length
      ? [
          element("h3", {}, title),
          element(
            "ul",
            {},
            items.map((text) => element("li", {}, text)),
          ),
        ]
      : [];
  if (runs.length === 1) {
    const [{ about }] = runs;
    return [...list("Notes", about.notes), ...list("Assumed", about.assumptions)];
  }
  const all = runs.map((run) => [...run.about.notes, ...run.about.assumptions]);
  return [
    ...list(
      "Assumed in A alone",
      all[0].filter((text) => !all[1].includes(text)),
    ),
    ...list(
      "Assumed in B alone",
      all[1].filter((text) => !all[0].includes(text)),
    ),
    ...list(
      "Assumed in both",
      all[0].filter((text) => all[1].includes(text)),
    ),
  ];
}
