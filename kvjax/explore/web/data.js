"use strict";
// What the page was made of: numbers and texts as JSON, and bytes that are unpacked layer by layer when they are asked for.
const given = JSON.parse(document.getElementById("data").textContent);
const { tokens, prompt, steps, layers, heads, methods } = given;
const places = tokens.length;
const HELD = 1, KEY_HOST = 2, VALUE_HOST = 4, REPRESENTS = 8, MERGED = 16, UNTOLD = 32, LEAVES = 64;

const unpack = async (text) => {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};

const unpackedLayers = new Map();
const loadLayer = (name, packed) => {
  if (!unpackedLayers.has(name)) unpackedLayers.set(name, unpack(packed));
  return unpackedLayers.get(name);
};

// All that is shown of one layer: bytes [head, step, place].
const fetchLayer = async (layer, sides) => ({
  attention: await loadLayer(`attention ${layer}`, given.attention[layer]),
  sides: await Promise.all(sides.map(async (m) => ({
    held: await loadLayer(`held ${m} ${layer}`, methods[m].held[layer]),
    off: await loadLayer(`off ${m} ${layer}`, methods[m].off[layer]),
  }))),
});

// Attention weights are held as their fourth root, from 0 to 255; lost weights [layer, head, step] in 65535ths.
const weightOf = (byte) => (byte / 255) ** 4;
const loadLost = async (m) => {
  const bytes = await loadLayer(`lost ${m}`, methods[m].lost);
  return new Uint16Array(bytes.buffer);
};
const lostAt = (lost, layer, head, step) => lost[(layer * heads + head) * steps + step] / 65535;
const byteIndex = (head, step, token) => (head * steps + step) * places + token;
