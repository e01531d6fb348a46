// Paper is white: whoever reads in the dark prints in the light.
matchMedia("print").addEventListener("change", ({ matches }) => {
  const { dataset } = document.documentElement;
  if (matches) dataset.read = dataset.theme;
  dataset.theme = matches ? "light" : dataset.read;
});
