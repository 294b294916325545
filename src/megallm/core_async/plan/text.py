"""Token ids of one request to text, as they come, up to its stop word. Pure; knows no request, no stream.

Two ideas of others. A window of the last few ids is decoded again with each new one, and what is
new in its text is given on: the prefix and read offsets of Hugging Face's text-generation-inference
(`Model.decode_token`). All stop words are looked for at once, a character at a time, in an automaton
whose state says how much text may still be the start of one: A. Aho and M. Corasick, Efficient string
matching, CACM 18 (1975).
"""

from collections import deque
from collections.abc import Callable, Sequence

type Detokenize = Callable[[list[int]], str]
"""Gives the text of ids, U+FFFD for bytes that are no character; does not keep the list."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_BROKEN = 3
"""Bytes, so at most replacement characters, that the beginning of one UTF-8 character can have."""
STEP = 8
"""Ids by which the window grows before it is shortened, to about half as many."""
MAX_STEP = 64


class TextStream:
    """The text of one request, grown by its tokens; it ends before its first stop word.

    The first stop word is the one that is complete first, reading character by character; of those
    complete at the same character, the longest. So neither the text nor `stop` nor
    `num_kept_tokens` depends on how the tokens were grouped into calls, nor on what comes after.

    All text is `detokenize` of all the tokens, provided that appending tokens only ever appends to
    what `detokenize` gives, broken characters at its end apart. Where it does otherwise, as
    SentencePiece's byte tokens do about invalid bytes, nothing that was shown is taken back.
    """

    def __init__(
        self, detokenize: Detokenize, stop_words: tuple[str, ...] = (), *, keep_stop: bool = False
    ) -> None:
        self.stop: str | None = None
        """The stop word that ended the text."""
        self._window = _Window(detokenize)
        self._stop_words = _StopWords(stop_words) if stop_words else None
        self._keep_stop = keep_stop
        self._shown: list[str] = []
        self._num_shown = 0
        self._open = ""
        """Text behind what is shown that may be the start of a stop word."""
        self._is_finished = False
        self._num_tokens = 0
        self._num_certain = 0
        """Characters of the text, shown or open."""
        self._marks: deque[tuple[int, int]] = deque()
        """For each of the last tokens, characters there were after it: certain ones, all of them."""
        self._num_kept: int | None = None

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return "".join(self._shown)

    @property
    def num_kept_tokens(self) -> int:
        """The fewest first tokens whose text begins with the kept text; all of them unless a stop matched.

        With `keep_stop` the kept text includes the stop word.
        """
        return self._num_tokens if self._num_kept is None else self._num_kept

    @property
    def num_safe_tokens(self) -> int:
        """How many of the tokens so far no later stop word can take away; at most `num_kept_tokens`.

        With stop words, the fewest first tokens whose text begins with what is shown.
        """
        if self._stop_words is None or self._is_finished or self.stop is not None:
            return self.num_kept_tokens
        return self._count_shown()

    def append(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; gives the text that no later token can change or cut off.

        After a stop word it takes nothing and gives nothing.
        """
        assert not self._is_finished, f"{len(token_ids)} tokens came after finish()"
        if self.stop is not None or not len(token_ids):
            return ""
        if self._stop_words is None:
            self._num_tokens += len(token_ids)
            return self._show(self._window.grow(list(token_ids)))
        shown = ""
        for token_id in token_ids:
            shown += self._append_one(token_id, self._stop_words)
            if self.stop is not None:
                break
        return shown

    def finish(self) -> str:
        """Gives what was held back: no token follows. Only `text` and the like are to be asked afterwards."""
        if self._is_finished or self.stop is not None:
            return ""
        self._is_finished = True
        rest = self._window.flush()
        if self._stop_words is None:
            return self._show(rest)
        shown = self._match(rest, self._stop_words)
        if self.stop is None:
            shown += self._show(self._open)
        return shown

    def _append_one(self, token_id: int, stop_words: "_StopWords") -> str:
        window = self._window
        new = window.grow([token_id])
        self._num_tokens += 1
        self._num_certain += len(new)
        self._marks.append((self._num_certain, self._num_certain + window.num_broken))
        return self._match(new, stop_words) if new else ""

    def _match(self, new: str, stop_words: "_StopWords") -> str:
        """Shows the open text and the new, up to a stop word or to what may be the start of one."""
        text = self._open + new
        end = stop_words.find(new)
        if end is None:
            num_open = 0 if self._keep_stop else stop_words.num_open
            shown = self._show(text[: len(text) - num_open])
            self._open = text[len(text) - num_open :]
            self._forget_marks()
            return shown
        self.stop = stop_words.found
        cut = len(self._open) + end - (0 if self._keep_stop else len(self.stop))
        shown = self._show(text[:cut])
        self._open = ""
        self._num_kept = self._count_shown()
        return shown

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
            self._num_shown += len(text)
        return text

    def _forget_marks(self) -> None:
        """Drops the marks of tokens that end inside what is shown: a cut is never before that."""
        marks = self._marks
        while marks and marks[0][1] < self._num_shown:
            marks.popleft()

    def _count_shown(self) -> int:
        num_shown = self._num_shown
        if not num_shown:
            return 0
        count = self._num_tokens - len(self._marks)
        for num_certain, num_all in self._marks:
            count += 1
            if num_certain >= num_shown:
                break
            if num_all >= num_shown and self.text.endswith(REPLACEMENT * (num_shown - num_certain)):
                break
        return count


class _Window:
    """The last ids of a request, decoded anew with each that comes.

    It may begin in the middle of a word, or of a character: only the end of its text is used, and
    it is shortened only where the shorter one's text has the same end.
    """

    __slots__ = ("_boundary", "_detokenize", "_given", "_ids", "_limit", "_num_held", "_step", "num_broken")

    def __init__(self, detokenize: Detokenize) -> None:
        self.num_broken = 0
        """Replacement characters at the end that were not given: a character may be on its way."""
        self._detokenize = detokenize
        self._ids: list[int] = []
        self._given: str = ""
        """The part of the window's text that was given."""
        self._num_held = 0
        """Ids at the end whose text was not given, or not all of it."""
        self._step = STEP
        self._limit = STEP
        """Ids of the window at which it is to be shortened."""
        self._boundary = 0
        """Where it may begin then, all text before that being whole; 0 while no such place is known."""

    def grow(self, ids: list[int]) -> str:
        """Takes ids; gives the text that became certain, as it would have come id by id."""
        self._ids += ids
        text = self._detokenize(self._ids)
        start = len(self._given)
        if text.startswith(self._given) and text.find(REPLACEMENT, start) < 0:
            self._num_held = self.num_broken = 0
            if start and len(text) == start:
                del self._ids[
                    -len(ids) :
                ]  # ids without text of their own, skipped special tokens, are no context
                return ""
            self._given = text
            return text[start:] + self._tidy(text)
        if len(ids) > 1:
            half = len(ids) // 2
            del self._ids[-len(ids) :]
            return self.grow(ids[:half]) + self.grow(ids[half:])
        return self._grow_broken(text)

    def flush(self) -> str:
        """Gives all the text that was not given."""
        text = self._detokenize(self._ids)
        if text.startswith(self._given):
            return text[len(self._given) :]
        return self._detokenize(self._ids[-self._num_held :])

    def _grow_broken(self, text: str) -> str:
        """Gives what is certain when the last id left broken characters, or changed what was given."""
        self._num_held += 1
        if not text.startswith(self._given):
            self._begin_at(len(self._ids) - self._num_held, "")
            text = self._detokenize(self._ids)
        rest = text[len(self._given) :]
        self.num_broken = min(MAX_BROKEN, len(rest) - len(rest.rstrip(REPLACEMENT)))
        new = rest[: len(rest) - self.num_broken]
        if new:
            self._given += new
            self._num_held = self.num_broken
        return new + self._tidy(text)

    def _tidy(self, text: str) -> str:
        """Shortens the window when it is long; gives text that has to be given up on for that, if any."""
        length = len(self._ids)
        if length < self._limit:
            is_whole = len(text) == len(self._given)
            if is_whole and not self._boundary and length >= self._limit - self._step // 2:
                self._boundary = length
            return ""
        start = self._boundary or length - self._step // 2
        shorter = self._detokenize(self._ids[start:])
        rest = text[len(self._given) :]
        # one given character more than what is held: a whole one, or the first of MAX_BROKEN + 1 broken ones
        if self._given and shorter.endswith(self._given[-1] + rest):
            self._begin_at(start, shorter[: len(shorter) - len(rest)])
            return ""
        if self._step < MAX_STEP:
            self._step *= 2
            self._limit = length + self._step
            self._boundary = 0
            return ""
        self._begin_at(start, shorter)
        self._num_held = self.num_broken = 0
        return rest

    def _begin_at(self, start: int, given: str) -> None:
        self._ids = self._ids[start:]
        self._given = given
        self._step = STEP
        self._limit = len(self._ids) + STEP
        self._boundary = 0


class _StopWords:
    """Finds the first of some words in a text that comes in pieces. States are numbers, 0 is the root."""

    __slots__ = ("_depths", "_fallbacks", "_next", "_state", "_words", "found")

    def __init__(self, words: tuple[str, ...]) -> None:
        assert all(words), f"an empty stop word among {words}"
        self.found = ""
        self._state = 0
        self._next: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._words = [""]
        """The longest word that ends in the state; mostly none."""
        for word in words:
            state = 0
            for char in word:
                state = self._next[state].setdefault(char, len(self._next))
                if state == len(self._next):
                    self._next.append({})
                    self._words.append("")
                    self._depths.append(0)
            self._words[state] = word
        self._fallbacks = [0] * len(self._next)
        """The state of the longest other suffix that is the start of a word."""
        self._link()

    @property
    def num_open(self) -> int:
        """Characters at the end of the text that may be the start of a word."""
        return self._depths[self._state]

    def find(self, text: str) -> int | None:
        """Reads on; gives the index in `text` behind the first word, which is `found` then."""
        following, fallbacks, words = self._next, self._fallbacks, self._words
        state = self._state
        if not state and following[0].keys().isdisjoint(text):
            return None
        for index, char in enumerate(text, 1):
            while state and char not in following[state]:
                state = fallbacks[state]
            state = following[state].get(char, 0)
            if words[state]:
                self.found = words[state]
                return index
        self._state = state
        return None

    def _link(self) -> None:
        """Fills the fallbacks, nearest to the root first."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                queue.append(child)
                self._depths[child] = self._depths[state] + 1
                if not state:
                    continue
                fallback = self._fallbacks[state]
                while fallback and char not in self._next[fallback]:
                    fallback = self._fallbacks[fallback]
                fallback = self._next[fallback].get(char, 0)
                self._fallbacks[child] = fallback
                self._words[child] = self._words[child] or self._words[fallback]
