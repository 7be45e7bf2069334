"use strict";
// What the page was made of: numbers and texts as JSON, and bytes that are unpacked layer by layer when they are asked for.
const given = JSON.parse(document.getElementById("data").textContent);
const { tokens, prompt, steps, layers, heads, methods } = given;
const places = tokens.length;
const HELD = 1, KEY_HOST = 2, VALUE_HOST = 4, REPRESENTS = 8, MERGED = 16, UNTOLD = 32, LEAVES = 64;

const unpacked = async (text) => {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};

const kept = new Map();
const ofLayer = (name, packed) => {
  if (!kept.has(name)) kept.set(name, unpacked(packed));
  return kept.get(name);
};

// All that is shown of one layer: bytes [head, step, place].
const fetched = async (layer, sides) => ({
  attention: await ofLayer(`attention ${layer}`, given.attention[layer]),
  sides: await Promise.all(sides.map(async (m) => ({
    held: await ofLayer(`held ${m} ${layer}`, methods[m].held[layer]),
    off: await ofLayer(`off ${m} ${layer}`, methods[m].off[layer]),
  }))),
});

// Shares of attention are held as the fourth root of a share, from 0 to 255; lost shares [layer, head, step] in 65535ths.
const shareOf = (byte) => (byte / 255) ** 4;
const lostOf = async (m) => {
  const bytes = await ofLayer(`lost ${m}`, methods[m].lost);
  return new Uint16Array(bytes.buffer);
};
const lostAt = (lost, layer, head, step) => lost[(layer * heads + head) * steps + step] / 65535;
const place = (head, step, token) => (head * steps + step) * places + token;
