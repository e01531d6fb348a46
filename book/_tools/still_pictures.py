"""A widget's picture for readers without JavaScript.

Our widgets put an `image/png` beside their `application/vnd.jupyter.widget-view+json` into one output. myst-nb then picks the
widget alone; here the picture goes along with it, inside <noscript>.
"""

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

VIEW = "application/vnd.jupyter.widget-view+json"


def is_bundle(node: nodes.Node) -> bool:
    """Whether a node holds the alternatives of one output, as myst-nb marks them."""
    return isinstance(node, nodes.container) and node.get("nb_element") == "mime_bundle"


def noscript(picture: nodes.Element, alt: str) -> list[nodes.Node]:
    """The picture between <noscript> tags, with a sentence for those who cannot see it either."""
    for image in picture.findall(nodes.image):
        image["alt"] = alt
    begin = nodes.raw(text="<noscript>", format="html")
    return [begin, *picture.children, nodes.raw(text="</noscript>", format="html")]


class StillPictures(SphinxPostTransform):
    """Append the picture to the widget, in every output that holds both."""

    default_priority = 3  # myst-nb selects one alternative at 4
    formats = ("html",)

    def run(self, **kwargs: object) -> None:
        for bundle in self.document.findall(is_bundle):
            parts = {part["mime_type"]: part for part in bundle.children}
            if VIEW in parts and "image/png" in parts:
                alt = parts["text/plain"].astext() if "text/plain" in parts else "What a widget shows first"
                parts[VIEW].extend(noscript(parts["image/png"], f"Still picture. {alt.strip()}."))
