// Player: animates one run of a distributed algorithm.
//
// Python computes a `scene` (ranks, their buffers cut into cells, messages, changes of cells, what lanes do); this only draws it.
// Parts of it stand in player_story.js, player_layout.js, player_board.js, player_picture.js,
// player_strip.js and player_code.js.

const PLAY = 1.2; // seconds from one stop to the next while playing, at speed 1

const folded = (name, ...inside) => html("details", {}, html("summary", {}, name), ...inside);

class Player extends Timed {
  constructor(model, el) {
    super(model, el, { scene: "build" });
    this.build();
  }

  build() {
    const scene = this.model.get("scene"), story = new Story(scene), { stops } = story, last = stops.length - 1;
    Object.assign(this, { story, texts: scene.texts, end: story.end, stops: stops.map(({ t }) => t) });
    this.drawing = svg("svg", { role: "img", "aria-label": scene.title });
    this.picture = new Picture(story, this.texts, this.drawing);
    this.strip = scene.strip && new Strip(scene, this.texts, (t) => (this.stop(false), this.move(t)));
    this.strip?.drawing.addEventListener("pointerup", () => this.model.save_changes());
    const longest = (texts) => texts.reduce((a, b) => (b.length > a.length ? b : a)), seconds = scene.unit === "s" ? " · 1.23 ms" : "";
    const controls = this.controls(fill(this.texts.counter, { i: last, n: last }) + seconds);
    const caption = this.captions(longest(stops.map(({ label, say }) => `${label}  ${say}`)));
    this.bytes = html("div", { class: "d2lps-now" });
    const room = html("div", { class: "d2lps-room", "aria-hidden": "true" }, longest(stops.map(({ text }) => text)));
    const bytes = folded(this.texts.messages, html("div", { class: "d2lps-caption" }, room, this.bytes));
    const note = html("div", { class: "d2lps-note" }, scene.note), strip = this.strip ? [this.strip.root] : [];
    this.code = scene.code && new Code(story, this.texts);
    const code = this.code ? [this.code.root] : [];
    this.mount("player", scene.title, this.drawing, controls, ...strip, caption, ...code, html("div", { class: "d2lps-folds" }, bytes, this.legend()), note);
  }

  resize() {
    const width = Math.max(300, this.width);
    this.picture.resize(width);
    this.strip?.resize(width);
    if (this.cable) this.cable.style.display = this.picture.drawn.links ? "" : "none"; // a small screen may have no room
    this.show(this.t);
  }

  // What the colors and signs mean, of those that this run shows.
  legend() {
    const { story, texts } = this, { scene } = story, list = html("ul");
    const item = (sign, ...text) => list.appendChild(html("li", {}, sign, html("span", {}, ...text)));
    const icon = (kind, style = "") => html("i", { class: kind, style });
    const drawn = (...nodes) => svg("svg", { viewBox: "0 0 26 16", width: 26, height: 16, "aria-hidden": "true" }, ...nodes);
    const arrow = (kind) => drawn(svg("g", { class: `arrow ${kind}` }, svg("path", { class: "shaft", style: "stroke-width: 2.5", d: "M2 8H16" }), svg("path", { class: "head", d: "M14 3L24 8L14 13Z" })));
    const mark = (d) => drawn(svg("g", { class: "mark" }, svg("circle", { cx: 13, cy: 8, r: 7 }), svg("path", { d })));
    const named = scene.ranks.some((rank) => !/^\d+$/.test(rank.name)); // or they are numbers
    const colors = story.contributors.flatMap((rank) => [" ", html("b", {}, icon("stripe", `background: var(--rank-${rank % COLORS})`), scene.ranks[rank].name)]);
    const happens = new Set(scene.changes.map(({ how }) => how));
    if (story.contributors.length) item(icon("stripes"), named ? texts.see_named : texts.see_stripe, ...colors);
    if (scene.whole > 0) item(icon("complete"), texts.see_complete);
    if (story.repeats) item(icon("repeated"), texts.see_repeated);
    if (scene.messages.length) item(arrow(""), texts.see_arrow), item(arrow("trail"), texts.see_trail);
    if (happens.has("combine")) item(mark("M9.5 8H16.5M13 4.5V11.5"), texts.see_combine);
    if (happens.has("recv")) item(mark("M13 4.5V11.5M10 8.5L13 11.5L16 8.5"), texts.see_recv);
    if (happens.has("copy")) item(mark("M9.5 6H16.5M9.5 10H16.5"), texts.see_copy);
    if (scene.changes.length) item(icon("changed"), texts.see_changed);
    if (scene.links) this.cable = item(drawn(svg("path", { class: "link used", d: "M1 8H25" })), texts.see_link);
    if (scene.stops.some(({ badges }) => badges)) item(icon("badged"), texts.see_badge);
    return folded(texts.legend, html("div", { class: "d2lps-see" }, html("p", {}, texts.see_card), list));
  }

  paint() {
    const { story, texts } = this, at = story.stopIndex(this.t), counter = fill(texts.counter, { i: at, n: story.stops.length - 1 });
    const { label, say, text } = story.stops[at];
    this.picture.draw(this.t);
    this.strip?.move(this.t);
    this.code?.light(this.t);
    this.bytes.textContent = text || "–";
    return { label, text: say, counter: story.scene.unit === "s" ? `${counter} · ${quantity(this.t, "s")}` : counter };
  }

  // Rounds take equally long; real time runs evenly, in a minute at most.
  pace(t) {
    const { story, end } = this, goal = this.after(t);
    return story.scene.unit === "s" ? Math.max(story.stride / PLAY, end / 60) : (goal - this.before(goal)) / PLAY;
  }
}

export default shownBy(Player);
