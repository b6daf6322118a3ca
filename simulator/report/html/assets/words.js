"use strict";
// Numbers in words, and elements of the page.

const SECOND = 1e12; // ticks
const LETTERS = "AB"; // what two runs are called

/** Return a duration in ticks to four digits, as the report writes it. */
function duration(ticks) {
  const seconds = ticks / SECOND;
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size >= 1000) return `${whole(Math.round(seconds))} s`;
  for (const [scale, unit] of [
    [1, "s"],
    [1e-3, "ms"],
    [1e-6, "us"],
    [1e-9, "ns"],
    [1e-12, "ps"],
  ])
    if (size >= scale * 0.99995) return `${digits(seconds / scale)} ${unit}`;
  return `${digits(seconds / 1e-12)} ps`;
}

/** Return an amount to four digits with a decimal prefix. */
function amount(value, unit) {
  for (const [scale, prefix] of [
    [1e15, "P"],
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ])
    if (value >= scale * 0.99995) return `${digits(value / scale)} ${prefix}${unit}`;
  return `${digits(value)} ${unit}`;
}

/** Return a number to four digits. */
function digits(value) {
  return String(Number(value.toPrecision(4)));
}

/** Return a whole number with commas. */
function whole(count) {
  return count.toLocaleString("en");
}

/** Return a share as percent. */
function percent(share) {
  return `${(100 * share).toFixed(1)}%`;
}

/** Return an element with attributes and children; a `class` is one, `on…` are listeners. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

/** Return a small square of a colour. */
function swatch(colour) {
  return element("i", { class: "swatch", style: { background: colour } });
}

/** Return a paragraph that explains. */
function aside(...texts) {
  return element("p", { class: "faint" }, ...texts);
}

/** Return a list of terms and what stands for them. */
function definitions(name, pairs) {
  const list = pairs.map(([term, text]) => [element("dt", {}, term), element("dd", {}, text)]);
  return element("dl", { class: name }, list);
}

/** Return a row of a table. */
function rowOf(cells, attributes = {}) {
  return element("tr", attributes, ...cells.map((cell) => element("td", {}, cell)));
}

/** Return a table with a head of texts and rows that are made. */
function tableOf(name, head, rows) {
  const cells = head.map((text) => element("th", { scope: "col" }, text));
  const thead = element("thead", {}, element("tr", {}, cells));
  return element("table", { class: name }, thead, element("tbody", {}, rows));
}

/** Return the ticks between the labels of an axis that has room for about `count` of them. */
function niceStep(range, count) {
  const rough = range / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((k) => k * power).find((step) => step >= rough) || rough;
}

/** Return the first index of sorted `values` in [low, high) that is above `value`. */
function above(values, value, low = 0, high = values.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}
