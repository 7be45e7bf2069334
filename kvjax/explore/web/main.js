// The page as a whole: what is shown, and what keys, pointers and selects do to it.
const byId = (id) => document.getElementById(id);
const at = { step: 0, token: null, ...given.first };
let sides = [], shown = 0;

const change = async (wish) => {
  const { by, sides: chosen, ...rest } = wish;
  const redraw = Object.keys(rest).some((name) => name !== "token" && rest[name] !== at[name]) || chosen;
  Object.assign(at, rest);
  if (chosen) for (const [side, m] of Object.entries(chosen)) at.sides[side] = m;
  if (redraw) await draw();
  if (at.token !== null) tell(by);
};

const draw = async () => {
  const turn = ++shown;
  const [bytes, losses] = await Promise.all([fetchLayer(at.layer, at.sides), Promise.all(at.sides.map(loadLost))]);
  if (turn !== shown) return; // something newer was asked for meanwhile
  byId("step").value = at.step + 1;
  byId("layer").value = at.layer;
  byId("head").value = at.head;
  const read = quote(tokens[prompt + at.step]);
  byId("where").textContent = `Step ${at.step + 1} of ${steps}: reads ${read}`;
  byId("goes").textContent = `the exact cache goes on with ${quote(given.likeliest[at.step])}`;
  byId("step").setAttribute("aria-valuetext", `step ${at.step + 1}, reads ${read}`);
  byId("back").disabled = at.step === 0;
  byId("forth").disabled = at.step === steps - 1;
  [...byId("answer").children].forEach((chip, step) => {
    if (step === at.step) chip.setAttribute("aria-current", "step");
    else chip.removeAttribute("aria-current");
  });
  const most = losses.flatMap((lost) => Array.from({ length: steps }, (_, s) => lostAt(lost, at.layer, at.head, s)));
  const scale = Math.max(0.01, ...most);
  sides.forEach((side, i) => side.show(at, at.sides[i], bytes.sides[i], bytes.attention, losses[i], scale));
  document.documentElement.dataset.drawn = turn;
};

// The words on one token, for both sides.
const tell = () => {
  const { token, step, layer, head } = at, weight = weightOf(sides[0].code(token)[2]);
  sides.forEach((side) => side.pick(token));
  const first = makeElement("p");
  first.append(makeElement("b", "", quote(tokens[token])), `, ${nameOf(token)}`);
  if (!isLater(token, step)) first.append(`: ${percent(weight)} of the exact attention at step ${step + 1}, layer ${layer}, head ${head}`);
  const lines = sides.map((side) => {
    const line = makeElement("p");
    line.append(makeElement("code", "", methods[side.m].name), ` ${side.describe(token)}`);
    return line;
  });
  byId("detail").replaceChildren(first, ...lines);
};

const move = (side, by) => {
  const from = at.token === null ? -1 : at.token;
  const token = Math.max(0, Math.min(places - 1, from + by));
  change({ token });
  const box = side.text, span = side.spans[token];
  if (span.offsetTop < box.scrollTop || span.offsetTop + span.offsetHeight > box.scrollTop + box.clientHeight)
    box.scrollTop = span.offsetTop - box.clientHeight / 2;
};

const MOVES = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, End: Infinity, Home: -Infinity };
const keys = (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("select, input")) return;
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key], side = sides.find((s) => s.text === event.target);
  if (by) change({ step: Math.max(0, Math.min(steps - 1, at.step + by)) });
  else if (side && event.key in MOVES) move(side, MOVES[event.key]);
  else return;
  event.preventDefault();
};

const legend = () => MARKS.map(([classes, color, words, strength]) => {
  const line = makeElement("li"), mark = makeElement("span", classes, "token"), swatch = makeElement("i");
  if (color) swatch.style.background = `var(--${color})`;
  if (strength) mark.style.setProperty("--a", strength);
  line.append(mark, swatch, makeElement("span", "", words));
  return line;
});

const begin = () => {
  byId("about").textContent = given.about;
  byId("step").max = steps;
  for (let l = 0; l < layers; l++) byId("layer").append(new Option(l, l));
  for (let h = 0; h < heads; h++) byId("head").append(new Option(h, h));
  tokens.slice(prompt).forEach((text, step) => {
    const chip = makeElement("button", "", text.replaceAll("\n", "⏎") || "▯");
    chip.type = "button";
    chip.addEventListener("click", () => change({ step }));
    byId("answer").append(chip);
  });
  byId("legend").append(...legend());
  byId("marks").open = matchMedia("(min-width: 44rem)").matches;
  byId("notes").append(...given.notes.map((text) => makeElement("li", "", text)));
  sides = at.sides.map((_, i) => new Side(i, change));
  byId("sides").append(...sides.map((side) => side.root));
  byId("detail").append(makeElement("p", "", "Point at a token, tap it, or walk to it with the arrow keys: what has become of it is said here."));
  byId("layer").addEventListener("change", (event) => change({ layer: Number(event.target.value) }));
  byId("head").addEventListener("change", (event) => change({ head: Number(event.target.value) }));
  byId("step").addEventListener("input", (event) => change({ step: Number(event.target.value) - 1 }));
  byId("back").addEventListener("click", () => change({ step: at.step - 1 }));
  byId("forth").addEventListener("click", () => change({ step: at.step + 1 }));
  document.addEventListener("keydown", keys);
  let scrolling = null; // texts scroll together, led by the one that is touched
  for (const side of sides) {
    for (const kind of ["pointerdown", "pointerenter", "wheel", "focus"]) side.text.addEventListener(kind, () => (scrolling = side), { passive: true });
    side.text.addEventListener("scroll", () => {
      if (scrolling === side) for (const other of sides) other.text.scrollTop = side.text.scrollTop;
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("resize", draw);
  draw();
};
if ("DecompressionStream" in window) begin();
else byId("about").textContent = "This browser cannot unpack the page's data: it has no DecompressionStream. Any of 2023 or later has.";
