"""A share as a bar of characters, to half a character."""


def bar(share: float | None, width: int) -> str:
    """``share`` of ``width`` characters, what lies outside of 0-1 at its end; blank where it is not known."""
    if share is None:
        return " " * width
    halves = round(min(max(share, 0.0), 1.0) * 2 * width)
    full, half = divmod(halves, 2)
    return ("█" * full + "▌" * half).ljust(width, "░")
