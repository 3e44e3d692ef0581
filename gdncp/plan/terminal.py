"""The picture of a plan in a terminal: in colour, or in letters where there is none."""

from __future__ import annotations

from textwrap import wrap

from rich.console import Console
from rich.style import Style
from rich.text import Text

from gdncp.plan.prefill_plan import PrefillPlan
from gdncp.plan.show import COLOURS, ENTERS, JOINED, LETTERS, MIXED, SEVERAL, Block, Line, Picture, Row, draw

LEAST_WIDTH = 60
NARROWEST = 2  # characters of a block: its boundary, and one to see what it is
MAX_ROWS = 40
MAX_ENTRIES = 12


def show(plan: PrefillPlan, console: Console, width: int) -> None:
    """Print the map, its legend and the predicted times, at most `width` wide."""
    last_label = f"rank {plan.world_size - 1}" + f" lane {plan.cp_chunk_lanes - 1}" * (plan.cp_chunk_lanes > 1)
    before, after = len(last_label) + 2, max(len(f"{plan.num_tokens_total:,}"), len("tokens")) + 2
    columns = max(width - before - after, 4 * NARROWEST)
    picture = draw(plan, columns=columns, narrowest=NARROWEST, max_rows=MAX_ROWS, max_entries=MAX_ENTRIES)
    pen = Pen(picture, in_colour=console.color_system is not None and not console.no_color)
    for line in _lines(picture, pen, width, before, after):
        console.print(line, soft_wrap=True)


class Pen:
    """Draws in colour or, with no escape codes at all, in ASCII."""

    def __init__(self, picture: Picture, in_colour: bool):
        self.picture = picture
        self.in_colour = in_colour

    def bold(self, text: str) -> Text:
        return Text(text, "bold" if self.in_colour else "")

    def block(self, block: Block) -> Text:
        width = block.right - block.left
        edge = ">" if block.num_entering else "▏" if self.in_colour else "|"
        label = next((label for label in block.labels() if len(label) < width - 1), "")
        if self.in_colour:
            return Text(f"{edge}{label}".ljust(width), self._style(block.sequence))
        letter = self.letter(block.sequence)
        if block.sequence is not None and not label.startswith("x"):
            label = ""  # its letter says which
        return Text(edge + label.center(width - 1, letter))

    def sample(self, sequence: int | None) -> Text:
        """The legend's."""
        return Text("   ", self._style(sequence)) if self.in_colour else Text(f"  {self.letter(sequence)}")

    def letter(self, sequence: int | None) -> str:
        return "." if sequence is None else LETTERS[self.picture.letters[sequence]]

    def repetition(self) -> str:
        """What to say where there are more sequences than marks."""
        shown, marks = len(self.picture.colours), len(COLOURS if self.in_colour else LETTERS)
        if shown <= marks:
            return ""
        return "colours repeat; a block's number is its sequence" if self.in_colour else f"letters repeat after {marks}"

    def _style(self, sequence: int | None) -> Style:
        fill, text = SEVERAL if sequence is None else COLOURS[self.picture.colours[sequence]]
        return Style(color=text, bgcolor=fill)


def _lines(picture: Picture, pen: Pen, width: int, before: int, after: int) -> list[Text]:
    lines = [pen.bold(picture.title)]
    for fact in picture.facts:
        lines += _hanging(Text(), fact, width)
    lines += [Text(), pen.bold(" " * (before + picture.columns) + "tokens".rjust(after))]
    for row in picture.rows:
        lines += [_bar(row, pen, picture.columns, before, after)] if row.blocks else _words(row, before, width)
    lines.append(Text())
    for entry in picture.legend:
        lines += _hanging(pen.sample(entry.sequence), entry.text, width)
    signs = {ENTERS: Text("  >"), JOINED: Text(" xN"), MIXED: pen.sample(None)}
    explained = [(Text("   "), picture.legend_more), *((signs[name], text) for name, text in picture.notes.items())]
    for sign, text in [*explained, (Text("   "), pen.repetition())]:
        lines += _hanging(sign, text, width) if text else []
    return [*lines, Text(), *_table(picture.times, pen), *_hanging(Text(), picture.exchange, width)]


def _bar(row: Row, pen: Pen, columns: int, before: int, after: int) -> Text:
    bar = Text().join(map(pen.block, row.blocks))
    bar.pad_right(columns - len(bar))
    return Text(row.label.ljust(before)) + bar + Text(f"{row.num_tokens:,}".rjust(after))


def _words(row: Row, before: int, width: int) -> list[Text]:
    indent = " " * before
    label = row.label.ljust(before - 2) + "  "
    return [Text(line) for line in wrap(label + row.text, width, subsequent_indent=indent, drop_whitespace=False)]


def _hanging(sign: Text, text: str, width: int) -> list[Text]:
    """Wrapped text, behind a sign if there is one."""
    indent = "  " + " " * (len(sign) + 2) * bool(sign)
    first, *more = wrap(text, width - len(indent))
    return [Text("  ") + sign + Text("  " * bool(sign) + first), *(Text(indent + line) for line in more)]


def _table(lines: tuple[Line, ...], pen: Pen) -> list[Text]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    return [pen.bold(rows[0]), *map(Text, rows[1:])]
