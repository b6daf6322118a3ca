"use strict";
// One colour means one thing: those of the figures, and what differs between light and dark.

const OTHER = "#8a8a8a";
const DARK = { fill: "#33373d", stall: "#565c66", drain: "#44494f" };

class Colours {
  /** @param named colour by name, from the page's data. */
  constructor(named) {
    this.named = named;
    this.cache = new Map();
    this.read();
  }

  /** Read the colours of the theme off the page. */
  read() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(`--${name}`).trim();
    this.ink = of("ink");
    this.faint = of("faint");
    this.line = of("line");
    this.idle = of("idle");
    this.card = of("card");
    this.accent = of("accent");
    this.idleChannels = channels(this.idle);
    this.dark = lightness(this.card) < 0.5;
  }

  /** Return the colour of a kind, paler for later chunks of a rank. */
  of(kind, chunk = 0) {
    const key = `${kind} ${chunk}`;
    if (!this.cache.has(key)) {
      const colour = this.named[kind] ?? OTHER;
      this.cache.set(key, chunk ? paler(colour, 0.5 * (1 - 0.5 ** chunk)) : colour);
    }
    return this.cache.get(key);
  }

  /** Return the colour of a category of time; idle time is grey, darker on dark ground. */
  ofCategory(name) {
    return (this.dark && DARK[name]) || this.of(name);
  }
}

function channels(colour) {
  return [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
}

function paler(colour, share) {
  const mixed = channels(colour).map((c) => Math.round(c + (255 - c) * share));
  return `#${mixed.map((c) => c.toString(16).padStart(2, "0")).join("")}`;
}

/** Return how light a colour prints in grey, from 0 to 1. */
function lightness(colour) {
  const [red, green, blue] = channels(colour);
  return (0.299 * red + 0.587 * green + 0.114 * blue) / 255;
}

/** Return black or white, whichever is read more easily on a colour. */
function inkOn(colour) {
  return lightness(colour) > 0.5 ? "#1a1a1a" : "#ffffff";
}
