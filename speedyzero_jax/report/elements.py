"""Elements of HTML and SVG. Text is escaped when they are written, wherever it comes from."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence

_LONG = 30  # rows up to which a table is shown at once

Child = ET.Element | str | None


def element(tag: str, *children: Child, **attributes: object) -> ET.Element:
  """An element; None children are left out, `class_` and `stroke_width` lose `_`."""
  named = {key.rstrip("_").replace("_", "-"): str(value) for key, value in attributes.items()}
  made = ET.Element(tag, named)
  for child in children:
    if isinstance(child, ET.Element):
      made.append(child)
    elif child and len(made):
      made[-1].tail = (made[-1].tail or "") + child
    elif child:
      made.text = (made.text or "") + child
  return made


def table(heads: Sequence[Child], rows: Sequence[Sequence[Child]], words: int = 1) -> ET.Element:
  """A table that scrolls sideways where it is too wide, folded if it is long.

  All but the first `words` columns hold numbers.
  """
  body = [
    element(
      "tr", *(element("td", x, class_="word" if i < words else "") for i, x in enumerate(row))
    )
    for row in rows
  ]
  head = [element("th", x, class_="word" if i < words else "") for i, x in enumerate(heads)]
  drawn = element("table", element("thead", element("tr", *head)), element("tbody", *body))
  scrolled = element("div", drawn, class_="scroll", tabindex=0)
  if len(rows) <= _LONG:
    return scrolled
  return element("details", element("summary", f"{len(rows)} rows"), scrolled)


def write(root: ET.Element) -> bytes:
  """The bytes of an HTML document."""
  text = "<!DOCTYPE html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"
  return text.encode(errors="replace")  # file names may hold what UTF-8 can't
