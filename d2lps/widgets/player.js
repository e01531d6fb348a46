// Player: animates one run of a distributed algorithm.
//
// Python computes a `scene` (ranks, their buffers cut into cells, messages, changes of cells, what lanes do); this only draws it.
// Parts of it stand in player_story.js, player_layout.js, player_picture.js and player_strip.js.

const PLAY = 1.2; // seconds from one stop to the next while playing, at speed 1

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
    const captions = stops.map(({ label, text }) => `${label}  ${text}`), seconds = scene.unit === "s" ? " · 1.23 ms" : "";
    const controls = this.controls(fill(this.texts.counter, { i: last, n: last }) + seconds);
    const caption = this.captions(captions.reduce((a, b) => (b.length > a.length ? b : a)));
    const note = html("div", { class: "d2lps-note" }, scene.note), strip = this.strip ? [this.strip.root] : [];
    this.mount("player", scene.title, this.drawing, this.legend(), controls, ...strip, caption, note);
  }

  resize() {
    const width = Math.max(300, this.width);
    this.picture.resize(width);
    this.strip?.resize(width);
    this.show(this.t);
  }

  legend() {
    const { story, texts } = this, legend = html("div", { class: "d2lps-legend" });
    const item = (kind, text, style = "") => html("span", {}, html("i", { class: kind, style }), text);
    const named = story.scene.ranks.some((rank) => !/^\d+$/.test(rank.name)); // or they are numbers
    if (story.contributors.length) legend.append(html("span", {}, named ? texts.contribution_of : texts.contribution));
    for (const rank of story.contributors) legend.append(item("stripe", story.scene.ranks[rank].name, `background: var(--rank-${rank % COLOURS})`));
    if (story.scene.whole > 0) legend.append(item("complete", texts.complete));
    if (story.repeats) legend.append(item("repeated", texts.repeated));
    return legend;
  }

  paint() {
    const { story, texts } = this, at = story.stopIndex(this.t), counter = fill(texts.counter, { i: at, n: story.stops.length - 1 });
    this.picture.draw(this.t);
    this.strip?.move(this.t);
    return { ...story.stops[at], counter: story.scene.unit === "s" ? `${counter} · ${quantity(this.t, "s")}` : counter };
  }

  // Rounds take equally long; real time runs evenly, in a minute at most.
  pace(t) {
    const { story, end } = this, goal = this.after(t);
    return story.scene.unit === "s" ? Math.max(story.stride / PLAY, end / 60) : (goal - this.before(goal)) / PLAY;
  }
}

export default shownBy(Player);
