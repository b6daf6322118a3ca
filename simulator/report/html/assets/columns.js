"use strict";
// Columns of numbers out of the page's text: base64, deflate, planes of bytes (see columns.py).

/** Return the columns of a packed text by name, each a typed array. */
async function unpacked(head, text) {
  const binary = atob(text);
  const deflated = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) deflated[i] = binary.charCodeAt(i);
  const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const columns = {};
  let at = 0;
  for (const column of head) {
    const size = column.length * column.width;
    const planes = bytes.subarray(at, at + size);
    columns[column.name] = column.kind === "real" ? reals(planes, column) : wholes(planes, column);
    at += size;
  }
  return columns;
}

/** Return whole numbers: 32-bit ones where they are small, else doubles. */
function wholes(planes, { length, width, base }) {
  const small = width < 4 && Math.abs(base) < 2 ** 30;
  const out = small ? new Int32Array(length) : new Float64Array(length);
  for (let plane = width - 1; plane >= 0; plane--) {
    const from = plane * length;
    for (let i = 0; i < length; i++) out[i] = out[i] * 256 + planes[from + i];
  }
  if (base) for (let i = 0; i < length; i++) out[i] += base;
  return out;
}

/** Return 32-bit floats. */
function reals(planes, { length }) {
  const bytes = new Uint8Array(4 * length);
  for (let plane = 0; plane < 4; plane++)
    for (let i = 0; i < length; i++) bytes[4 * i + plane] = planes[plane * length + i];
  return new Float32Array(bytes.buffer);
}
