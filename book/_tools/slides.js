// Keys: the next and the last slide, and the notes. A player that has the focus keeps its own keys.
const slides = () => [...document.querySelectorAll(".slide")];
const at = () => {
  const tops = slides().map((slide) => Math.abs(slide.getBoundingClientRect().top));
  return tops.indexOf(Math.min(...tops));
};
const go = (index) => slides().at(Math.max(0, Math.min(index, slides().length - 1))).scrollIntoView();
const KEYS = { ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1 };

addEventListener("keydown", (event) => {
  if (event.target.closest?.(".d2lps, input, select, button") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "n") document.body.classList.toggle("notes");
  if (event.key in KEYS) {
    event.preventDefault();
    go(at() + KEYS[event.key]);
  }
});
