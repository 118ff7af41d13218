"""An SVG of matplotlib's in a third of its bytes: the same picture, drawn to 0.1 of a point (1/72 inch)."""

import re
from xml.etree import ElementTree as ET

SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
ET.register_namespace("", SVG[1:-1])
_PLACES = ("d", "x", "y", "width", "height")
_FRACTION = re.compile(r"-?\d+\.\d+")
_REFERENCE = re.compile(r"(?:(?<=url\(#)|(?<=href=\"#))[\w.-]+")
_NO_ANGLE = re.compile(r"rotate\(-?0 [^)]*\)")
_FONT = re.compile(r"font-family: [^;]*; ?")  # the style sheet of `plots.svg` says it for all


def compact(text: str) -> tuple[str, dict[str, str]]:
    """The SVG with classes for styles, and what the classes are: name -> declarations.

    Names that nothing refers to, groups without attributes and white space go.
    """
    root = ET.fromstring(text)
    names = {name: f"i{place}" for place, name in enumerate(dict.fromkeys(_REFERENCE.findall(text)))}
    styles: dict[str, str] = {}
    for item in root.iter():
        item.text, item.tail = (part if part and part.strip() else None for part in (item.text, item.tail))
        if item is not root:
            made = dict(_short(key, value, names, styles) for key, value in item.items())
            item.attrib = {key: value for key, value in made.items() if value}
    _unwrap(root)
    return ET.tostring(root, encoding="unicode"), {name: style for style, name in styles.items()}


def _short(key: str, value: str, names: dict[str, str], styles: dict[str, str]) -> tuple[str, str]:
    """An attribute and its value; an empty one where it is not needed."""
    if key == "id":
        return key, names.get(value, "")
    if key == f"{XLINK}href":
        return "href", f"#{names[value[1:]]}" if value.startswith("#") else value
    value = _REFERENCE.sub(lambda name: names[name[0]], value)
    if key in ("style", "fill"):  # fill: of the ground of a hatch, which has no style
        value = value if key == "style" else f"fill: {value}"
        return "class", styles.setdefault(_FONT.sub("", value), f"c{len(styles)}")
    if key == "transform":
        return key, _NO_ANGLE.sub("", value)
    if key in _PLACES:
        value = _FRACTION.sub(_rounded, value)
        return key, re.sub(r"\s*([A-Za-z])\s*", r"\1", value) if key == "d" else value
    return key, value


def _rounded(number: re.Match[str]) -> str:
    """To one decimal; numbers below ten to two, since marks are drawn in them."""
    value = float(number[0])
    text = f"{value:.{1 if abs(value) >= 10 else 2}f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _unwrap(item: ET.Element) -> None:
    """Groups without an attribute give way to what they hold."""
    for child in item:
        _unwrap(child)
    item[:] = [part for child in item for part in (child if child.tag == f"{SVG}g" and not child.attrib else [child])]
