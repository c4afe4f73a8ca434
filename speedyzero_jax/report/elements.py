"""HTML and SVG elements. All text is escaped when a document is serialized."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence

_LONG = 30  # tables with more rows are collapsed

Child = ET.Element | str | None


def element(tag: str, *children: Child, **attributes: object) -> ET.Element:
  """Creates an element. Children that are None are omitted.

  Attribute names lose trailing underscores (`class_`); other underscores become hyphens.
  """
  named = {key.rstrip("_").replace("_", "-"): str(value) for key, value in attributes.items()}
  parent = ET.Element(tag, named)
  for child in children:
    if isinstance(child, ET.Element):
      parent.append(child)
    elif child and len(parent):
      parent[-1].tail = (parent[-1].tail or "") + child
    elif child:
      parent.text = (parent.text or "") + child
  return parent


def table(heads: Sequence[Child], rows: Sequence[Sequence[Child]], words: int = 1) -> ET.Element:
  """Creates a table that scrolls horizontally if it is too wide and is collapsed if it is long.

  The first `words` columns are text, the others numbers.
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
  """Serializes an HTML document."""
  text = "<!DOCTYPE html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"
  return text.encode(errors="replace")  # file names may not be valid UTF-8
