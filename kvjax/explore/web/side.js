// One side of the page: a method, its numbers, the text as it holds it, and two small maps.
const makeElement = (tag, className, text) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};
const readColors = () => {
  const style = getComputedStyle(document.documentElement);
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  return Object.fromEntries(["raised", "exact", "inexact", "host", "stands", "lost", "soft"].map((name) => {
    pen.fillStyle = style.getPropertyValue(`--${name}`);
    pen.fillRect(0, 0, 1, 1);
    return [name, pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  }));
};
const tint = (byte) => Math.min(1, (byte / 255) ** 1.7 * 1.15);
const MISSED = 0.3; // the tint from which a token that is gone is drawn as missed

class Side {
  constructor(number, change) {
    this.root = document.getElementById("side").content.firstElementChild.cloneNode(true);
    this.find = (selector) => this.root.querySelector(selector);
    this.number = number;
    const select = this.find("select"), name = `Method ${"AB"[number]}`;
    this.find(".method span").textContent = name;
    this.root.setAttribute("aria-label", name);
    methods.forEach((m, i) => select.append(new Option(m.name, i)));
    select.addEventListener("change", () => change({ sides: { [number]: Number(select.value) } }));
    this.drawText(change);
    for (let step = 0; step < steps; step++) this.find(".bars").append(makeElement("i"));
    this.maps(change);
  }

  drawText(change) {
    this.text = this.find(".text");
    this.spans = tokens.map((text, token) => {
      const span = makeElement("span", "t", text.replaceAll("\n", "⏎\n"));
      span.id = `token-${this.number}-${token}`;
      span.setAttribute("role", "option");
      return span;
    });
    this.text.append(...this.spans);
    const pick = (event) => {
      const token = this.spans.indexOf(event.target);
      if (token >= 0) change({ token, by: this.number });
    };
    this.text.addEventListener("pointerover", pick);
    this.text.addEventListener("click", pick);
  }

  maps(change) {
    const steps_ = this.find(".steps"), heads_ = this.find(".heads");
    const along = (x, size, count) => Math.max(0, Math.min(count - 1, Math.floor((x / size) * count)));
    const at = (event) => {
      const box = steps_.getBoundingClientRect();
      return { token: along(event.clientX - box.left, box.width, places), step: along(event.clientY - box.top, box.height, steps) };
    };
    steps_.addEventListener("pointermove", (event) => change({ token: at(event).token }));
    steps_.addEventListener("click", (event) => change(at(event)));
    heads_.style.setProperty("--layers", layers);
    heads_.classList.toggle("many", layers > 12);
    for (let head = 0; head < heads; head++) for (let layer = 0; layer < layers; layer++) {
      const button = makeElement("button");
      Object.assign(button, { type: "button", tabIndex: -1 });
      button.addEventListener("click", () => change({ layer, head }));
      heads_.append(button);
    }
  }

  // All of one step: at {step, layer, head, token}, the method's number, its bytes, the exact attention, the lost weights, and the
  // weight that fills a bar.
  show(at, m, bytes, attention, lost, scale) {
    Object.assign(this, { at, m, bytes, attention, lost, scale });
    this.find("select").value = m;
    this.text.setAttribute("aria-label", `The text as ${methods[m].name} holds it, step ${at.step + 1}`);
    this.marks();
    this.numbers();
    this.stepsMap();
    this.headsMap();
  }

  code(token, step = this.at.step) {
    const i = byteIndex(this.at.head, step, token);
    return [this.bytes.held[i], this.bytes.off[i], this.attention[i]];
  }

  marks() {
    const { step } = this.at;
    this.spans.forEach((span, token) => {
      const [held, off, weight] = this.code(token), strength = tint(weight);
      let classes = classesOf(token, step, held, off);
      if (strength >= MISSED && classes === "t gone") classes += " missed";
      if (tokens[token] === "") classes += " part";
      if (span.className !== classes) span.className = classes;
      span.style.setProperty("--a", strength.toFixed(2));
    });
  }

  numbers() {
    const { step, layer, head } = this.at, method = methods[this.m], numTokens = prompt + step + 1;
    const count = { held: 0, exact: 0, inexact: 0, host: 0, stands: 0 };
    for (let token = 0; token < numTokens; token++) {
      const [held, off] = this.code(token);
      if (!(held & HELD)) continue;
      count.held++;
      if (isOff(off)) count.inexact++;
      else if (!(held & UNTOLD)) count.exact++;
      if (held & (KEY_HOST | VALUE_HOST)) count.host++;
      if (held & (REPRESENTS | MERGED)) count.stands++;
    }
    const parts = [count.exact && `${count.exact} exactly`, count.inexact && `${count.inexact} inexactly`, count.host && `${count.host} on the host`,
      count.stands && `${count.stands} standing for others`, numTokens - count.held && `${numTokens - count.held} gone`];
    this.find(".counts").textContent = `${count.held} of ${numTokens} are held: ${parts.filter(Boolean).join(", ")}`;
    const scale = makeElement("small", "", `bars up to ${percent(this.scale)}`);
    this.find(".lost .number").replaceChildren(percent(lostAt(this.lost, layer, head, step)), scale);
    const mean = (values) => values.reduce((a, b) => a + b, 0) / (values.length * 65535);
    const here = Array.from(this.lost.filter((_, i) => i % steps === step));
    this.find(".means").textContent = `all heads: ${percent(mean(here))}; all heads and steps: ${percent(mean(Array.from(this.lost)))}`;
    const bars = [...this.find(".bars").children], losses = bars.map((_, s) => lostAt(this.lost, layer, head, s));
    bars.forEach((bar, s) => {
      bar.style.setProperty("--h", (losses[s] / this.scale).toFixed(3));
      bar.classList.toggle("here", s === step);
    });
    this.next(method, step);
    this.find(".bytes").textContent = `${method.device} on the device${method.on_host ? `, ${method.on_host} on the host` : ""}`;
  }

  next(method, step) {
    const same = method.likeliest[step] === given.likeliest[step], next = this.find(".next");
    next.replaceChildren(makeElement("b", "", quote(method.likeliest[step])));
    next.append(same ? " as the exact cache" : " where the exact cache has ", same ? "" : makeElement("b", "", quote(given.likeliest[step])));
    const own = this.find(".own"), alike = method.own[0], rest = method.own[1];
    own.replaceChildren(alike, rest ? makeElement("mark", "", rest) : "");
    if (!rest) own.append(makeElement("span", "note", alike ? "\n(the same)" : ""));
  }

  stepsMap() {
    const box = this.find(".steps"), canvas = this.find(".steps canvas"), colors = readColors();
    Object.assign(canvas, { width: places, height: steps });
    const pen = canvas.getContext("2d"), image = pen.createImageData(places, steps);
    for (let step = 0; step < steps; step++) for (let token = 0; token < places; token++) {
      const [held, off, weight] = this.code(token, step);
      let color = "raised", strength = 1;
      if (held & UNTOLD) color = "soft";
      else if (held & (REPRESENTS | MERGED)) color = "stands";
      else if (held & (KEY_HOST | VALUE_HOST)) color = "host";
      else if (held & HELD) color = isOff(off) ? "inexact" : "exact";
      else if (!isLater(token, step)) [color, strength] = ["lost", tint(weight)];
      const mixed = [0, 1, 2].map((i) => colors[color][i] * strength + colors.raised[i] * (1 - strength));
      image.data.set([...mixed, 255], 4 * (step * places + token));
    }
    pen.putImageData(image, 0, 0);
    box.style.height = `${Math.max(4, Math.min(12, 160 / steps)) * steps}px`;
    box.classList.toggle("pixels", box.clientWidth >= places);
    const line = this.find(".steps i");
    Object.assign(line.style, { top: `${(100 * this.at.step) / steps}%`, height: `${100 / steps}%` });
    canvas.setAttribute("aria-label", `${places} tokens across, ${steps} steps down, as ${methods[this.m].name} holds them; step ${this.at.step + 1} is outlined`);
  }

  headsMap() {
    const { step, layer, head } = this.at;
    let most = [0, 0, 0];
    [...this.find(".heads").children].forEach((button, i) => {
      const l = i % layers, h = Math.floor(i / layers), weight = lostAt(this.lost, l, h, step);
      if (weight > most[0]) most = [weight, l, h];
      button.style.setProperty("--h", weight.toFixed(3));
      button.classList.toggle("here", l === layer && h === head);
      button.textContent = Math.round(100 * weight);
      button.title = `layer ${l}, head ${h}: ${percent(weight)}`;
    });
    const words = most[0] ? `The most, ${percent(most[0])}, in layer ${most[1]}, head ${most[2]}.` : "Nothing is lost at this step.";
    this.find(".most").textContent = words;
    this.find(".heads").setAttribute("aria-label", `Percent lost, by layer and head. ${words}`);
  }

  pick(token) {
    for (const span of this.text.querySelectorAll("[aria-selected]")) span.removeAttribute("aria-selected");
    if (token === null) return;
    this.spans[token].setAttribute("aria-selected", "true");
    this.text.setAttribute("aria-activedescendant", this.spans[token].id);
  }

  describe(token) {
    const { step } = this.at;
    const bytes = Array.from({ length: steps }, (_, s) => this.code(token, s)[0]);
    return describeToken(token, step, bytes, this.code(token)[1]);
  }
}
