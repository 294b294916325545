"""What every tokenizer of a checkpoint can do, behind megatron's tokenizer interface.

Knows chat templates and special ids; knows no library and no file format, and imports no megatron, so
that a process that only serves text loads it in a moment.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, overload

from msgspec import Struct

from megallm.core_async.errors import InvalidRequestError
from megallm.models.chat_template import render


class SpecialIds(Struct, frozen=True):
    """The ids of a tokenizer's named special tokens; None for one it has not."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None
    stops: tuple[int, ...] = ()
    """Further ids that end an answer: a chat model's end of turn, where that is not its eos."""


class ModelTokenizer(ABC):
    """Text to token ids and back, with megatron's names for everything.

    Immutable once built: it may be shared between threads, and pickled into another process.
    """

    def __init__(
        self, tokens: list[str], *, special_ids: SpecialIds, chat_template: str | None = None, path: str = ""
    ) -> None:
        """`tokens`: spelled as the vocabulary has them, by id."""
        self._tokens = tokens
        self._special_ids = special_ids
        self.chat_template: Final = chat_template
        self.path: Final = path

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Gives the ids of a text; special tokens spelled out in it are taken as such.

        A bos goes before it, or an eos behind it, where the tokenizer is made that way.
        """

    @abstractmethod
    def tokenize_rendered(self, text: str) -> list[int]:
        """Gives the ids of what a chat template wrote: no bos or eos is added to its own."""

    @abstractmethod
    def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Gives the text of ids; bytes that are no UTF-8 become U+FFFD, ids out of range nothing."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """Gives the bytes a token stands for: a special token's spelling, else part of a text's UTF-8."""

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:  # noqa: ARG002 - megatron's signature
        """Gives, for each id, the index of its first character in the text of all ids.

        A token that starts within a character gives that character's index.
        """
        offsets: list[int] = []
        num_characters = 0
        for token_id in ids:
            encoded = self.token_bytes(token_id)
            starts_inside = bool(encoded) and _continues(encoded[0])
            offsets.append(max(0, num_characters - starts_inside))
            num_characters += sum(not _continues(byte) for byte in encoded)
        return offsets

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        *,
        tokenize: Literal[True] = True,
        **options: Any,
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        *,
        tokenize: Literal[False],
        **options: Any,
    ) -> str: ...
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],  # Any: what JSON can hold
        chat_template: str | None = None,
        *,
        tokenize: bool = True,
        **options: Any,  # Any: the template's own variables, what JSON can hold
    ) -> list[int] | str:
        """Gives a conversation as one prompt, in ids or in text.

        `options` reach the template: `add_generation_prompt`, `tools`, `documents` and whatever else
        it reads. The template writes its own special tokens, so no bos or eos is added to the ids.

        Raises: InvalidRequestError when there is no template, or the template refuses the messages.
        """
        template = chat_template or self.chat_template
        if template is None:
            raise InvalidRequestError(
                f"the tokenizer of {self.path} has no chat template; pass chat_template"
            )
        named = {
            f"{name}_token": self._tokens[token_id]
            for name, token_id in (
                ("bos", self.bos),
                ("eos", self.eos_id),
                ("pad", self.pad),
                ("unk", self.unk),
            )
            if token_id is not None
        }
        text = render(template, conversation, **(named | options))
        return self.tokenize_rendered(text) if tokenize else text

    @property
    def vocab_size(self) -> int:
        """Gives the number of ids, special tokens included."""
        return len(self._tokens)

    @property
    def vocab(self) -> list[str]:
        """Gives the tokens by id, as the vocabulary spells them (a list of the caller's own)."""
        return list(self._tokens)

    @property
    def inv_vocab(self) -> dict[int, str]:
        """Gives token by id, as megatron's Hugging Face tokenizer does."""
        return dict(enumerate(self._tokens))

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """Gives what tells this tokenizer from another, for megatron's data set caches."""
        return OrderedDict(
            {"class": f"{type(self).__module__}.{type(self).__qualname__}", "tokenizer_path": self.path}
        )

    @property
    def bos(self) -> int | None:
        """Gives the id that begins a sequence."""
        return self._special_ids.bos

    @property
    def eod(self) -> int | None:
        """Gives the id that ends a document: generation stops at it."""
        return self._special_ids.eos

    @property
    def eos_id(self) -> int | None:
        """Gives the same as `eod`."""
        return self._special_ids.eos

    @property
    def pad(self) -> int | None:
        """Gives the id that fills up a batch."""
        return self._special_ids.pad

    @property
    def unk(self) -> int | None:
        """Gives the id that stands for an unknown token."""
        return self._special_ids.unk

    @property
    def stop_ids(self) -> list[int]:
        """Gives every id that ends an answer, the eos among them (a list of the caller's own)."""
        ids = [self.eod, *self._special_ids.stops]
        return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))

    bos_id = bos
    eos = eod
    pad_id = pad
    unk_id = unk


def _continues(byte: int) -> bool:
    """Tells whether a byte is a later one of a UTF-8 character."""
    return byte & 0xC0 == 0x80  # noqa: PLR2004 - the bits of UTF-8
