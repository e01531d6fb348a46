// Choices: a slider, a switch or a list for each argument, and below them the thing that was made with these values.

class Choices extends Widget {
  constructor(model, el) {
    super(model, el, { data: "build", chosen: "draw" });
    this.build();
  }

  build() {
    const data = (this.data = this.model.get("data")), { options } = data;
    this.which = data.which.split(" ");
    this.drawing = html("div", { class: "stage", "aria-busy": true });
    this.controls = options.map((option, k) => this.control(option, k));
    this.things = this.shown = undefined;
    this.mount("choices", data.title, html("div", { class: "options" }, ...this.controls.map(({ label }) => label)), this.drawing);
    unpack(data.things).then((things) => {
      if (data !== this.data) return;
      this.things = things;
      this.drawing.removeAttribute("aria-busy");
      this.draw();
    });
  }

  control({ key, name, values, kind }, k) {
    if (kind === "switch") {
      const input = html("input", { type: "checkbox", "data-action": key });
      input.addEventListener("change", () => this.choose(k, +input.checked));
      return { label: html("label", {}, input, html("span", {}, name)), show: (i) => (input.checked = i === 1) };
    }
    if (kind === "list") {
      const select = html("select", { "data-action": key }, ...values.map((value, i) => html("option", { value: i }, value)));
      select.addEventListener("change", () => this.choose(k, +select.value));
      return { label: html("label", {}, html("span", {}, name), select), show: (i) => (select.value = i) };
    }
    const input = html("input", { type: "range", "data-action": key, min: 0, max: values.length - 1, step: 1 }), value = html("b");
    value.style.minWidth = `${Math.max(...values.map((text) => text.length))}ch`;
    input.addEventListener("input", () => this.choose(k, +input.value));
    const show = (i) => {
      input.value = i;
      input.setAttribute("aria-valuetext", values[i]);
      value.textContent = values[i];
    };
    return { label: html("label", { class: "slider" }, html("span", {}, name), input, value), show };
  }

  draw() {
    const { which, things, data: { options } } = this, wanted = this.model.get("chosen");
    this.chosen = options.map(({ values }, k) => clamp(wanted[k] ?? 0, 0, values.length - 1));
    this.chosen.forEach((i, k) => this.controls[k].show(i));
    const shown = which[this.chosen.reduce((all, i, k) => all * options[k].values.length + i, 0)];
    if (shown === this.shown || !things) return;
    this.shown = shown;
    this.drawing.style.minHeight = `${this.drawing.offsetHeight}px`; // the page below stays where it is while this is exchanged
    this.remove?.();
    this.remove = put(this.drawing, things[shown]);
    this.drawing.style.minHeight = "";
  }

  choose(k, i) {
    this.model.set("chosen", this.chosen.with(k, i));
    this.model.save_changes();
  }

  destroy() {
    this.remove?.();
    this.data = undefined;
    super.destroy();
  }
}

export default shownBy(Choices);
