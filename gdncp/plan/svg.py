"""The picture of a plan as an SVG file: the same rows, blocks, legend and times as in the terminal."""

from __future__ import annotations

from xml.sax.saxutils import escape

from gdncp.plan.prefill_plan import PrefillPlan
from gdncp.plan.show import COLOURS, ENTERS, JOINED, MIXED, SEVERAL, Block, Picture, Row, draw

COLUMNS = 860  # pixels of the longest bar
NARROWEST = 4
MAX_ROWS = 80
MAX_ENTRIES = 16

_MARGIN, _LINE, _ROW, _BAR = 20, 18, 22, 17  # pixels: around it all; a line of text; from bar to bar; a bar
_CHARACTER = 6.6  # a generous width of a character of 11 pixels
_GREY = "#555555"


def svg(plan: PrefillPlan) -> str:
    """A whole SVG document."""
    picture = draw(plan, columns=COLUMNS, narrowest=NARROWEST, max_rows=MAX_ROWS, max_entries=MAX_ENTRIES)
    bars = _MARGIN + 8 * max([len(row.label) for row in picture.rows if row.blocks], default=0) + 10
    width = bars + COLUMNS + round(_CHARACTER * len(f"{plan.num_tokens_total:,}")) + 14 + _MARGIN
    page = Page()
    page.text(_MARGIN, picture.title, size=16, bold=True)
    for fact in picture.facts:
        page.text(_MARGIN, fact)
    page.gap(_LINE // 2)
    page.text(width - _MARGIN, "tokens", fill=_GREY, anchor="end")
    page.gap(4)
    for row in picture.rows:
        _draw_row(page, row, picture, bars, width - _MARGIN)
    page.gap(_LINE // 2)
    _draw_legend(page, picture)
    page.gap(_LINE // 2)
    _draw_times(page, picture)
    return page.document(picture.title, width)


class Page:
    """Elements from top to bottom."""

    def __init__(self) -> None:
        self.y = _MARGIN
        self.elements: list[str] = []

    def gap(self, height: int) -> None:
        self.y += height

    def text(
        self, x: float, text: str, *, size: int = 12, bold: bool = False, fill: str = "#111111", anchor: str = "start"
    ) -> None:
        self.gap(max(size + 6, _LINE))
        self.write(x, self.y - 5, text, size=size, bold=bold, fill=fill, anchor=anchor)

    def write(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        bold: bool = False,
        fill: str = "#111111",
        anchor: str = "start",
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def box(self, x: int, y: int, width: int, height: int, fill: str, title: str = "") -> None:
        """A white hairline parts it from the next."""
        self.elements.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="#ffffff">'
            f"<title>{escape(title)}</title></rect>"
        )

    def arrow(self, x: int, y: int) -> None:
        self.elements.append(f'<path d="M{x} {y}v{_BAR}l7 {-_BAR / 2:g}z" fill="#000000" stroke="#ffffff"/>')

    def document(self, title: str, width: int) -> str:
        height = self.y + _MARGIN
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif">',
                f"<title>{escape(title)}</title>",
                f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
                *self.elements,
                "</svg>\n",
            ]
        )


def _draw_row(page: Page, row: Row, picture: Picture, left: int, right: int) -> None:
    top, baseline = page.y, page.y + _BAR - 4
    page.write(_MARGIN, baseline, row.label)
    page.gap(_ROW)
    if not row.blocks:
        page.write(max(left, _MARGIN + 8 * len(row.label) + 10), baseline, row.text, fill=_GREY)
        return
    for block in row.blocks:
        _draw_block(page, block, picture, left + block.left, top)
    page.write(right, baseline, f"{row.num_tokens:,}", size=11, fill=_GREY, anchor="end")


def _draw_block(page: Page, block: Block, picture: Picture, x: int, y: int) -> None:
    width = block.right - block.left
    fill, ink = SEVERAL if block.sequence is None else COLOURS[picture.colours[block.sequence]]
    page.box(x, y, width, _BAR, fill, _describe(block))
    room = width - 4
    if block.num_entering:
        page.arrow(x, y)
        room -= 8
    label = next((label for label in block.labels() if _CHARACTER * len(label) <= room), "")
    if label:
        middle = x + width / 2 + (4 if block.num_entering else 0)
        page.write(middle, y + _BAR - 5, label, size=11, fill=ink, anchor="middle")


def _describe(block: Block) -> str:
    """What a browser shows under the pointer."""
    first, last = block.chunks[0], block.chunks[-1]
    sequences = (
        f"sequence {first.sequence}" if block.sequence is not None else f"sequences {first.sequence} to {last.sequence}"
    )
    chunks = f"CP chunk {first.ordinal}" if len(block.chunks) == 1 else f"{len(block.chunks)} CP chunks"
    return f"{sequences}, {chunks}: tokens [{first.start}, {last.stop}), {block.num_tokens:,} tokens"


def _draw_legend(page: Page, picture: Picture) -> None:
    def sample(colours: tuple[str, str]) -> None:
        page.box(_MARGIN, page.y + 2, 24, _BAR - 4, colours[0])

    text = _MARGIN + 32
    for entry in picture.legend:
        sample(COLOURS[picture.colours[entry.sequence]])
        page.text(text, entry.text)
    if picture.legend_more:
        page.text(text, picture.legend_more)
    for name, meaning in picture.notes.items():
        if name == ENTERS:
            page.arrow(_MARGIN + 9, page.y + 1)
        elif name == JOINED:
            page.write(_MARGIN + 12, page.y + _LINE - 5, "xN", size=11, anchor="middle")
        elif name == MIXED:
            sample(SEVERAL)
        page.text(text, meaning)
    if len(picture.colours) > len(COLOURS):
        page.text(text, "colours repeat; a block's number is its sequence")


def _draw_times(page: Page, picture: Picture) -> None:
    ends = (_MARGIN, _MARGIN + 270, _MARGIN + 390, _MARGIN + 480)
    for number, line in enumerate(picture.times):
        page.gap(_LINE)
        for column, (x, cell) in enumerate(zip(ends, line, strict=True)):
            page.write(x, page.y - 5, cell, bold=not number, anchor="end" if column else "start")
    page.text(_MARGIN, picture.exchange)
