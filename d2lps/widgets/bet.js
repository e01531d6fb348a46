// Bet: a question; once a reader has answered it, or has asked not to, the answers and the result that it hid.

class Bet extends Widget {
  constructor(model, el) {
    super(model, el, { data: "build" });
    this.build();
  }

  build() {
    const data = (this.data = this.model.get("data")), { texts, choices } = data;
    this.leave();
    this.drawing = html("div", { class: "result", hidden: "" });
    this.verdict = html("div", { class: "verdict", tabindex: -1, "aria-live": "polite" });
    this.answers = html("div", { class: "answers" });
    const stage = html("div", { class: "stage", "aria-busy": true });
    this.drawing.append(this.verdict, this.answers, stage);
    this.ask = html("div", { class: "ask" }, ...(choices.length ? this.buttons() : this.number()), this.button("skip", texts.skip, () => this.reveal()));
    this.mount("bet", data.question, this.ask, this.drawing);
    this.show(); // built from the start, so that it is there in print
    unpack(data.things).then((things) => {
      if (data !== this.data) return;
      this.removals = things.map((thing) => put(stage.appendChild(html("div")), thing));
      stage.removeAttribute("aria-busy");
    });
  }

  button(action, text, act) {
    const button = html("button", { type: "button", "data-action": action }, text);
    button.addEventListener("click", act);
    return button;
  }

  buttons() {
    return this.data.choices.map((text, i) => this.button(`choice-${i}`, text, () => this.reveal(text)));
  }

  number() {
    const { texts, unit } = this.data, name = fill(texts.number, { unit });
    this.input = html("input", { type: "number", step: "any", "data-action": "number", "aria-label": name, placeholder: "?" });
    this.input.addEventListener("keydown", (event) => event.key === "Enter" && this.submit());
    return [html("span", { class: "amount" }, this.input, unit), this.button("submit", texts.submit, () => this.submit())];
  }

  submit() {
    const value = this.input.valueAsNumber;
    return Number.isFinite(value) ? this.reveal(value) : this.input.focus();
  }

  reveal(bet) {
    this.show(bet);
    this.drawing.hidden = false;
    this.ask.hidden = true;
    this.verdict.focus({ preventScroll: true });
  }

  // The words, and each answer in its place.
  show(bet) {
    const { answers, texts, choices } = this.data, all = { ...(bet === undefined ? {} : { bet }), ...answers };
    this.verdict.textContent = this.words(bet, answers.measurement ?? answers.prediction);
    this.answers.replaceChildren(...(choices.length ? this.badges(all) : this.bars(all)));
  }

  words(bet, truth) {
    const { texts, answers } = this.data;
    if (bet === undefined) return texts.skipped;
    if (bet === truth) return texts.right;
    if (typeof truth === "string") return fill(texts.wrong, { answer: truth });
    const ratio = bet / truth, what = texts["measurement" in answers ? "measurement" : "prediction"];
    if (Math.abs(ratio - 1) <= 0.1) return fill(texts.near, { what });
    if (!(ratio > 0 && Number.isFinite(ratio))) return fill(texts.wrong, { answer: this.amount(truth) });
    return ratio > 1 ? fill(texts.high, { x: digits(ratio), what }) : fill(texts.low, { x: digits(1 / ratio), what });
  }

  amount(x) { return fill(this.data.texts.value, { x: digits(x), unit: this.data.unit }).trim(); }

  // Every choice, and what was bet, predicted, measured of them.
  badges(all) {
    const { texts, choices } = this.data;
    return choices.map((text) => {
      const badges = Object.entries(all).filter(([, answer]) => answer === text).map(([name]) => html("i", { class: name }, texts[name]));
      return html("div", badges.length ? { class: "choice chosen" } : { class: "choice" }, html("span", {}, text), ...badges);
    });
  }

  // A bar for each number.
  bars(all) {
    const { texts } = this.data, most = Math.max(...Object.values(all).map(Math.abs)) || 1;
    return Object.entries(all).map(([name, x]) => html("div", { class: `bar ${name}` }, html("span", {}, texts[name]),
      html("span", { class: "bed" }, html("i", { style: `width: ${(100 * Math.abs(x)) / most}%` })), html("b", {}, this.amount(x))));
  }

  leave() { this.removals?.forEach((remove) => remove()); }

  destroy() {
    this.leave();
    this.data = undefined;
    super.destroy();
  }
}

const digits = (x) => String(Math.abs(x) >= 1000 ? Math.round(x) : +x.toPrecision(3));

export default shownBy(Bet);
