// A token's state in words and as classes; every mark of the page is explained from here.
const isOff = (off) => off > 0;
const isLater = (token, step) => token > prompt + step;

const classesOf = (token, step, held, off) => {
  if (isLater(token, step)) return "t later";
  if (!(held & HELD)) return "t gone";
  const found = ["t"];
  if (held & UNTOLD) found.push("untold");
  else if (isOff(off)) found.push("inexact");
  if (held & (KEY_HOST | VALUE_HOST)) found.push("host");
  if (held & REPRESENTS) found.push("stands");
  if (held & MERGED) found.push("merged");
  if (held & LEAVES) found.push("leaves");
  if (token === prompt + step) found.push("now");
  return found.join(" ");
};

const percent = (fraction) => {
  if (fraction === 0) return "0 %";
  if (fraction < 0.0001) return "less than 0.01 %";
  return `${(100 * fraction).toPrecision(fraction >= 0.9995 ? 3 : 2)} %`;
};
const errorOf = (level) => 2 ** (given.least + given.per_level * level);
const both = (key, value, words) => {
  if (key && value) return `key and value ${words}`;
  return key ? `key ${words}` : `value ${words}`;
};

const quote = (text) => `“${text.replaceAll("\n", "⏎")}”`;
const nameOf = (token) => (token < prompt ? `token ${token + 1} of the text` : `token ${token - prompt + 1} of the answer`);

// What one method makes of a token at a step; bytes: the token's held bytes at all steps.
const describeToken = (token, step, bytes, off) => {
  if (isLater(token, step)) return "not written yet";
  const held = bytes[step];
  const last = bytes.findLastIndex((byte) => byte & HELD);
  if (!(held & HELD)) {
    const before = bytes.slice(0, step).findLastIndex((byte) => byte & HELD);
    if (before < 0) return token < prompt ? "gone since the text was read" : "gone";
    return `gone: it left after step ${before + 1}`;
  }
  const words = [];
  if (held & UNTOLD) words.push("held; the method does not tell how exactly");
  else if (isOff(off)) {
    const key = off >> 4, value = off & 15;
    const parts = [key && `key off by about ${percent(errorOf(key))}`, value && `value off by about ${percent(errorOf(value))}`];
    words.push(`held inexactly, ${parts.filter(Boolean).join(", ")}`);
  } else words.push("held exactly");
  if (held & (KEY_HOST | VALUE_HOST)) words.push(both(held & KEY_HOST, held & VALUE_HOST, "on the host"));
  if (held & REPRESENTS) words.push("chosen to stand for others");
  if (held & MERGED) words.push("others were folded into it");
  if (last < steps - 1) words.push(held & LEAVES ? "leaves after this step" : `leaves after step ${last + 1}`);
  return words.join("; ");
};

// Classes of a sample, its color in the map of all steps, the words, and how much attention the sample gets.
const MARKS = [
  ["t", "exact", "held exactly"],
  ["t inexact", "inexact", "inexactly: few bits, or few numbers"],
  ["t host", "host", "on the host, key or value"],
  ["t stands", "stands", "chosen to stand for others"],
  ["t merged", "stands", "others folded into it"],
  ["t untold", "soft", "held, it is not told how"],
  ["t gone", "raised", "gone"],
  ["t gone missed", "lost", "gone, with much of the exact attention", 0.6],
  ["t leaves", "", "leaves after this step"],
  ["t", "", "much of the exact attention", 0.6],
  ["t now", "", "read by this step"],
  ["t later", "", "not written yet"],
];
