// Typesets formulas where the book is built, so that no page need do it: reads [{tex, display}, ...] from the standard input, and
// writes { formulas: [html, ...], css } to the standard output. The argument is the folder of MathJax's package.
const fs = require("fs"), path = require("path"), folder = path.resolve(process.argv[2]);

async function main() {
  const asked = JSON.parse(fs.readFileSync(0, "utf8"));
  const MathJax = await require(folder).init({
    loader: { load: ["input/tex", "output/chtml", "a11y/assistive-mml"], failed(error) { throw error; } },
    options: { enableAssistiveMml: true }, // for those who hear a formula
    chtml: { fontURL: "mathjax/output/chtml/fonts/woff-v2", adaptiveCSS: true },
    tex: { formatError(jax, error) { throw Error(`${error.message} in ${JSON.stringify(jax.latex ?? "")}`); } },
  });
  const { adaptor } = MathJax.startup, formulas = [];
  for (const { tex, display } of asked) {
    try {
      formulas.push(adaptor.outerHTML(await MathJax.tex2chtmlPromise(tex, { display })));
    } catch (error) {
      throw Error(`${tex}: ${error.message}`);
    }
  }
  const css = adaptor.textContent(MathJax.chtmlStylesheet());
  fs.writeFileSync(1, JSON.stringify({ formulas, css }));
}

main().catch((error) => { console.error(error.message); process.exit(1); });
