"""Reads a page as a browser would, strictly: every element is closed, in order."""

from collections import defaultdict
from html.parser import HTMLParser

_VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Elements, attributes and tables of a page.

    Attributes:
        tags: All names of elements.
        attributes: All (element, name, value).
        tables: By section, each a list of rows of cells.
        text: All text but the style sheet's, by section; "" holds the rest.
        labels: Text of SVG, by section.
    """

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self._open = set(), [], []
        self.tables, self.text = defaultdict(list), defaultdict(str)
        self._section = ""
        self.feed(html)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag in _VOID:
            return
        self._open.append(tag)
        if tag == "section":
            self._section = dict(attrs)["id"]
        elif tag == "table":
            self.tables[self._section].append([])
        elif tag == "tr":
            self.tables[self._section][-1].append([])
        elif tag in ("td", "th"):
            self.tables[self._section][-1][-1].append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data):
        if "style" in self._open:
            return
        if self._open and self._open[-1] in ("td", "th"):
            self.tables[self._section][-1][-1][-1] += data
        self.text[self._section] += data

    def column(self, section, table, head):
        """Returns a column of a table by the heads of its rows."""
        rows = self.tables[section][table]
        place = rows[0].index(head)
        return {row[0]: row[place] for row in rows[1:]}
