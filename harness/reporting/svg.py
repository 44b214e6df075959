"""Reduces SVG files of matplotlib: the same picture in a fraction of the bytes.

Numbers are rounded to two decimals, a hundredth of a point. Clip paths (no chart draws outside its axes by accident),
groups without attributes, ids without references, comments and metadata are removed. Text stays text, in the reader's
font.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

NAMESPACE = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"

#: the font used for the layout, then others of similar width, so that texts do not overlap
FONTS = "DejaVu Sans, Verdana, Segoe UI, Helvetica, Arial, sans-serif"

NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
REFERENCE = re.compile(r"#([\w-]+)")
DROPPED = {f"{{{NAMESPACE}}}{name}" for name in ("metadata", "clipPath")}
GROUP, USE = f"{{{NAMESPACE}}}g", f"{{{NAMESPACE}}}use"


def shortened(text: str) -> str:
    """The reduced drawing, one line for each element."""
    ElementTree.register_namespace("", NAMESPACE)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(text)
    values = [value for element in root.iter() for value in element.attrib.values()]
    referred = {name for value in values if "clip" not in value for name in REFERENCE.findall(value)}
    for element in list(root.iter()):
        _attributes(element, referred)
    _children(root)
    root.set("font-family", FONTS)
    ElementTree.indent(root, "")
    return ElementTree.tostring(root, encoding="unicode").replace(" />", "/>") + "\n"


def _attributes(element: ElementTree.Element, referred: set[str]) -> None:
    """Removes the attributes that an element does not need, and shortens the others."""
    attributes = element.attrib
    attributes.pop("clip-path", None)
    if attributes.get("id") not in referred:
        attributes.pop("id", None)
    for name, value in attributes.items():
        if not name.startswith("{"):
            attributes[name] = NUMBER.sub(_rounded, " ".join(value.split()))
    if attributes.get("transform", "").startswith("rotate(-0 "):
        del attributes["transform"]
    if "style" in attributes:
        attributes["style"] = _style(attributes["style"])


def _rounded(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), 2) + 0.0:g}"  # + 0.0 turns -0.0 into 0.0


def _style(text: str) -> str:
    """A style without its font family, which is the root's; `font` has only a size and possibly a weight."""
    rules = []
    for rule in filter(None, (part.strip() for part in text.split(";"))):
        name, _, value = (part.strip() for part in rule.partition(":"))
        if name == "font":
            size = re.search(r"[\d.]+px", value)
            weight = re.search(r"\b(bold|[1-9]00)\b", value)
            rules += [f"font-weight:{weight[0]}"] if weight else []
            rules += [f"font-size:{size[0]}"] if size else []
        elif name != "font-family":
            rules.append(f"{name}:{value}")
    return ";".join(rules)


def _children(parent: ElementTree.Element) -> None:
    """Removes empty groups, and groups that only hold others; moves a style that all marks of a group share to it."""
    kept: list[ElementTree.Element] = []
    for child in parent:
        _children(child)
        if child.tag in DROPPED or (not len(child) and not child.attrib and not (child.text or "").strip()):
            continue
        uses = child.findall(USE)
        styles = {use.get("style") for use in uses}
        if child.tag == GROUP and len(uses) > 1 and len(styles) == 1 and None not in styles and not child.attrib:
            child.set("style", str(styles.pop()))
            for use in uses:
                del use.attrib["style"]
        kept += list(child) if child.tag == GROUP and not child.attrib else [child]
    parent[:] = kept
