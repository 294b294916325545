"""Reasoning in front of an answer: `deepseek-r1-reasoning` and `nemotron-v3-reasoning`. Pure."""

from megallm.http.parsers.markers import MarkerFinder
from megallm.http.parsers.pieces import Content, Piece, Reasoning

BEGIN = "<think>"
END = "</think>"


class ReasoningParser:
    """Takes what comes before `</think>` for reasoning; without one, everything.

    `<think>` itself may be part of the prompt, so an output without it begins inside the reasoning.
    Text before it belongs to the reasoning; blanks alone are dropped.
    """

    def __init__(
        self,
        *,
        ends_before: tuple[str, ...] = (),
        begins_inside: bool = True,
        fills_content: bool = False,
    ) -> None:
        """Begins an output.

        Args:
            ends_before: Markers that end the reasoning too, and are left to the next parser: a model
                that calls a tool may forget to close its reasoning.
            begins_inside: False where the prompt closed the reasoning: an output that does not
                begin with `<think>` is content then.
            fills_content: Whether reasoning that no content follows is content. It is held back
                until that is known.
        """
        self._ends = MarkerFinder((BEGIN, END, *ends_before))
        self._begins_inside = begins_inside
        self._fills_content = fills_content
        self._read = self._read_begin
        self._text = ""
        self._blanks: list[str] = []
        """What came before `_text`, while nothing but blanks has come."""
        self._held: list[str] = []
        """Reasoning that may turn out to be the content."""
        self._has_content = False

    def feed(self, text: str) -> list[Piece]:
        """Gives the pieces that are certain by now; text that could begin a marker is held back."""
        self._text += text
        return self._read()

    def finish(self) -> list[Piece]:
        """Gives what was held back: the output has ended."""
        pieces: list[Piece] = []
        if self._read == self._read_begin:
            pieces = self._begin_without()
        rest, self._text = self._text, ""
        pieces += self._content(rest) if self._read == self._read_content else self._reasoning(rest)
        if self._held:
            pieces.append(Content("".join(self._held)))
        return pieces

    def _read_begin(self) -> list[Piece]:
        """Decides, once that is certain, whether the output begins with `<think>`."""
        stripped = self._text.lstrip()
        if not stripped:
            self._blanks.append(self._text)
            self._text = ""
            return []
        if stripped.startswith(BEGIN):
            self._text = stripped.removeprefix(BEGIN)
            self._read = self._read_reasoning
            return self._read()
        return [] if BEGIN.startswith(stripped) else self._begin_without()

    def _begin_without(self) -> list[Piece]:
        """Begins where there is no `<think>`, with the blanks that came before."""
        self._text = "".join([*self._blanks, self._text])
        self._read = self._read_reasoning if self._begins_inside else self._read_content
        return self._read()

    def _read_reasoning(self) -> list[Piece]:
        pieces: list[Piece] = []
        marker: str | None = BEGIN
        at = 0
        while marker == BEGIN:  # one more of them says nothing
            found = self._ends.find(self._text, at)
            pieces += self._reasoning(found.before)
            marker, at = found.marker, found.end
        self._text = self._text[at:]
        if marker is None:
            return pieces
        self._text = ("" if marker == END else marker) + self._text
        self._read = self._read_content
        return pieces + self._read()

    def _read_content(self) -> list[Piece]:
        text, self._text = self._text, ""
        return self._content(text)

    def _reasoning(self, text: str) -> list[Piece]:
        if self._fills_content:
            if text:
                self._held.append(text)
            return []
        return [Reasoning(text)] if text else []

    def _content(self, text: str) -> list[Piece]:
        if not text:
            return []
        held, self._held = "".join(self._held), []
        return [Reasoning(held), Content(text)] if held else [Content(text)]
