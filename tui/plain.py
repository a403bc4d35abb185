"""Text that somebody else wrote, made harmless for a terminal (``store.plain``) and never read as markup.

Callers get ``rich.text.Text`` or plain strings, and no widget parses them.
"""

from rich.text import Text

from store.plain import LINE, block, line

__all__ = ["block", "cell", "line"]


def cell(text: object, style: str = "", limit: int = LINE) -> Text:
    """One harmless line for a table."""
    return Text(line(text, limit), style=style, no_wrap=True, overflow="ellipsis", end="")
