// Sweep: time against bytes, a line for each algorithm, for the number of ranks that the slider chooses.
//
// Python has simulated every point and found who is the fastest where; this file only draws `data`.

// Powers of ten from `low` to `high`, every second or third where there are more than `most`.
function decades(low, high, most) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9), step = Math.ceil((last - first + 1) / most);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => first + i).filter((e) => (last - e) % step === 0).map((e) => 10 ** e);
}

// Labels at wanted heights, moved apart so that each has `room`, between low and high.
function spread(wanted, room, low, high) {
  const at = [...wanted], order = wanted.map((_, i) => i).sort((i, j) => wanted[i] - wanted[j]);
  for (let round = 0; round < 60; round++) {
    for (let k = 1; k < order.length; k++) {
      const i = order[k - 1], j = order[k], push = Math.max(0, room - at[j] + at[i]) / 2;
      at[i] = clamp(at[i] - push, low, high);
      at[j] = clamp(at[j] + push, low, high);
    }
  }
  return at;
}

class Sweep extends Widget {
  constructor(model, el) {
    super(model, el, { data: "build", ranks: "draw", cursor: "draw" });
    this.build();
  }

  build() {
    const data = (this.data = this.model.get("data")), { texts } = data;
    this.slider = html("input", { type: "range", "data-action": "ranks", min: 0, max: data.ranks.length - 1, step: 1, "aria-label": texts.ranks });
    this.slider.addEventListener("input", () => this.choose("ranks", +this.slider.value));
    this.count = html("b");
    this.drawing = svg("svg", { class: "plot", tabindex: 0, role: "slider", "aria-label": texts.plot, "aria-valuemin": 0, "aria-valuemax": data.sizes.length - 1 });
    for (const name of ["pointerdown", "pointermove"]) this.drawing.addEventListener(name, (event) => this.point(event));
    this.now = html("div", { class: "now", "aria-live": "polite" });
    this.list = html("ol");
    const ranks = html("label", { class: "ranks" }, html("span", {}, texts.ranks), this.slider, this.count);
    this.mount("sweep", data.title, ...(data.ranks.length > 1 ? [ranks] : []), this.drawing, this.now, this.list, html("div", { class: "d2lps-note" }, texts.hint));
  }

  resize() {
    const { width, data: { sizes, algorithms, times } } = this;
    this.height = Math.round(clamp(width * 0.6, 290, 400));
    this.size = width < 480 ? 10.5 : 12;
    const names = algorithms.map(({ name }) => textWidth(name, this.size)), every = times.flat(2).filter((time) => time > 0);
    this.box = { left: 54, right: width - Math.max(...names) - 20, top: 10, bottom: this.height - 62 };
    this.x = this.axis(sizes[0], sizes.at(-1), this.box.left, this.box.right);
    this.y = this.axis(Math.min(...every) / 1.25, Math.max(...every) * 1.25, this.box.bottom, this.box.top);
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.draw();
  }

  // A logarithmic scale: value to pixel.
  axis(low, high, from, to) {
    const scale = (value) => from + ((Math.log10(value) - Math.log10(low)) / (Math.log10(high) - Math.log10(low))) * (to - from);
    return Object.assign(scale, { low, high });
  }

  draw() {
    const { data } = this, { texts } = data;
    this.which = clamp(this.model.get("ranks"), 0, data.ranks.length - 1);
    this.at = clamp(this.model.get("cursor"), 0, data.sizes.length - 1);
    this.rows = data.times[this.which];
    this.drawing.replaceChildren(this.frame(), this.reigns(), ...this.curves(), this.names(), this.cursor());
    this.slider.value = this.which;
    const ranks = fill(texts.ranks_now, { n: data.ranks[this.which] });
    this.count.textContent = ranks;
    this.slider.setAttribute("aria-valuetext", ranks);
    this.read(ranks);
    this.drawing.setAttribute("aria-valuenow", this.at);
    this.drawing.setAttribute("aria-valuetext", this.now.textContent);
  }

  frame() {
    const { box, x, y, data: { texts } } = this, group = svg("g");
    for (const value of decades(x.low, x.high, (box.right - box.left) / 48)) {
      group.append(svg("path", { class: "grid", d: `M${x(value)} ${box.top}V${box.bottom}` }));
      group.append(svg("text", { x: x(value), y: this.height - 22, "text-anchor": "middle" }, quantity(value, "B")));
    }
    for (const value of decades(y.low, y.high, 8)) {
      group.append(svg("path", { class: "grid", d: `M${box.left} ${y(value)}H${box.right}` }));
      group.append(svg("text", { x: box.left - 6, y: y(value) + 4, "text-anchor": "end" }, quantity(value, "s")));
    }
    group.append(svg("path", { class: "grid", d: `M${box.left} ${box.top}V${box.bottom}H${box.right}V${box.top}Z` }));
    group.append(svg("text", { x: (box.left + box.right) / 2, y: this.height - 5, "text-anchor": "middle" }, texts.bytes));
    return group;
  }

  // The strip below the axis: who is the fastest where. A ring on the lines marks each change.
  reigns() {
    const { box, x, y, data } = this, { texts, algorithms } = data, reigns = data.reigns[this.which], group = svg("g");
    const top = box.bottom + 5, marks = [];
    reigns.forEach(({ nbytes, seconds, best }, i) => {
      const { name, style } = algorithms[best], from = x(nbytes), to = i + 1 < reigns.length ? x(reigns[i + 1].nbytes) : box.right;
      const title = svg("title", {}, fill(texts.crossing, { bytes: quantity(nbytes, "B"), name }));
      const text = shorten(name, 10.5, to - from - 8);
      group.append(svg("g", { class: "reigns" }, title,
        svg("rect", { x: from, y: top, width: Math.max(1, to - from - 1), height: 17, rx: 3, style: `fill: ${algorithmColor(style)}` }),
        svg("text", { class: "reign", x: (from + to) / 2, y: top + 12.5 }, text)));
      if (i) marks.push(svg("path", { class: "drop", d: `M${from} ${y(seconds)}V${top}` }), svg("circle", { class: "crossing", cx: from, cy: y(seconds), r: 4.5 }));
    });
    this.marks = marks; // drawn over the curves
    return group;
  }

  // Between two sizes time is taken to grow evenly with bytes, which log-log axes bend.
  curves() {
    const { x, y, data: { sizes, algorithms } } = this;
    const paths = this.rows.map((times, i) => {
      const points = [`${x(sizes[0]).toFixed(1)} ${y(times[0]).toFixed(1)}`];
      for (let k = 1; k < sizes.length; k++) {
        for (let step = 1; step <= 6; step++) {
          const f = step / 6, size = sizes[k - 1] * (sizes[k] / sizes[k - 1]) ** f, share = (size - sizes[k - 1]) / (sizes[k] - sizes[k - 1]);
          points.push(`${x(size).toFixed(1)} ${y(times[k - 1] + share * (times[k] - times[k - 1])).toFixed(1)}`);
        }
      }
      const { style } = algorithms[i];
      return svg("path", { class: `curve s${Math.min(style, ALGORITHMS - 1)}`, "data-algorithm": i, d: `M${points.join("L")}`, style: `stroke: ${algorithmColor(style)}` });
    });
    return [...paths, ...this.marks];
  }

  names() {
    const { box, y, data: { algorithms } } = this, ends = this.rows.map((times) => y(times.at(-1)));
    const at = spread(ends, 15, box.top + 6, box.bottom - 2);
    return svg("g", {}, ...algorithms.flatMap(({ name, style }, i) => [
      svg("path", { class: "leader", d: `M${box.right + 1} ${ends[i]}L${box.right + 10} ${at[i]}` }),
      svg("text", { class: "algorithm", x: box.right + 13, y: at[i] + 4, style: `fill: ${algorithmColor(style)}; font-size: ${this.size}px` }, name)]));
  }

  cursor() {
    const { box, x, y, data, at } = this, here = x(data.sizes[at]), winners = data.winners[this.which][at];
    const dots = this.rows.map((times, i) => svg("circle", {
      class: winners.includes(i) ? "dot best" : "dot", cx: here, cy: y(times[at]), r: winners.includes(i) ? 5 : 4, style: `fill: ${algorithmColor(data.algorithms[i].style)}`,
    }));
    const knob = svg("path", { class: "knob", d: `M${here} ${box.bottom + 24}l5 8h-10z` });
    return svg("g", {}, svg("path", { class: "cursor", d: `M${here} ${box.top}V${box.bottom + 4}` }), knob, ...dots);
  }

  // The times at the cursor, the fastest first.
  read(ranks) {
    const { data, at } = this, { texts, algorithms } = data, winners = data.winners[this.which][at];
    const times = this.rows.map((row) => row[at]), least = Math.min(...times);
    this.now.textContent = fill(texts.now, {
      bytes: quantity(data.sizes[at], "B"), ranks, names: winners.map((i) => algorithms[i].name).join(texts.same), time: quantity(least, "s"),
    });
    const order = times.map((_, i) => i).sort((i, j) => times[i] - times[j] || i - j);
    this.list.replaceChildren(...order.map((i) => {
      const { name, style } = algorithms[i], best = winners.includes(i);
      const sample = svg("svg", { viewBox: "0 0 30 10", "aria-hidden": "true" }, svg("path", { class: `curve s${Math.min(style, ALGORITHMS - 1)}`, d: "M0 5H30", style: `stroke: ${algorithmColor(style)}` }));
      const slower = best ? texts.fastest : fill(texts.slower, { x: (times[i] / least).toPrecision(3) });
      return html("li", best ? { class: "best" } : {}, sample, html("span", {}, name), html("span", {}, quantity(times[i], "s")), html("span", {}, slower));
    }));
  }

  choose(name, value) {
    if (value === this.model.get(name)) return;
    this.model.set(name, value);
    this.model.save_changes();
  }

  // The simulated size that is nearest to the pointer.
  point(event) {
    const { left, width } = this.drawing.getBoundingClientRect(), goal = ((event.clientX - left) / width) * this.width;
    const gaps = this.data.sizes.map((size) => Math.abs(this.x(size) - goal));
    this.choose("cursor", gaps.indexOf(Math.min(...gaps)));
  }

  key(event) {
    const last = this.data.sizes.length - 1, goal = { ArrowRight: this.at + 1, ArrowLeft: this.at - 1, Home: 0, End: last }[event.key];
    if (goal === undefined || event.target === this.slider) return false;
    this.choose("cursor", clamp(goal, 0, last));
    return true;
  }
}

export default shownBy(Sweep);
