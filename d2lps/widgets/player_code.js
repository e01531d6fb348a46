// The source of the function that ran: lines whose messages are seen now are lit, with the colors of the ranks that posted them.

class Code {
  constructor(story, texts) {
    const { name, lines } = story.scene.code, { ranks } = story.scene;
    Object.assign(this, { story, texts, ranks });
    this.lines = lines.map((text) => ({ text, who: html("span", { class: "who" }) }));
    for (const line of this.lines) line.node = html("div", {}, line.who, html("code", {}, line.text || " "));
    this.root = html("details", { class: "d2lps-code", open: "" }, html("summary", {}, `${texts.code}: ${name}`), html("div", { class: "lines", tabindex: 0 }, ...this.lines.map(({ node }) => node)));
  }

  // The messages that are under way, or, where none is, those of the step that has just ended.
  light(t) {
    const { messages, eps } = this.story, flying = messages.filter((m) => m.start < t - eps && m.end > t + eps);
    const seen = flying.length ? flying : messages.filter((m) => m.end <= t + eps && t <= m.stay + eps), who = this.lines.map(() => new Set());
    for (const { src, dst, src_lines = [], dst_lines = [] } of seen) {
      for (const line of src_lines) who[line].add(src);
      for (const line of dst_lines) who[line].add(dst);
    }
    this.lines.forEach((line, i) => {
      const ranks = [...who[i]].sort((a, b) => a - b), key = ranks.join();
      if (line.key === key) return;
      line.key = key;
      line.node.classList.toggle("lit", ranks.length > 0);
      line.who.title = ranks.map((r) => this.ranks[r].name).join(", ");
      line.who.replaceChildren(...ranks.slice(0, 8).map((r) => html("i", { style: `background: var(--rank-${r % COLORS})` })));
    });
  }
}
