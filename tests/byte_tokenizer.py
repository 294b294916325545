"""A tokenizer of single bytes and a few pairs, whose specials are spelled like text."""

from collections.abc import Sequence

SPECIAL = {256: "<|end|>", 257: "<|start|>"}
PIECES = [b'{"', b'":', b"ab", b"abc", b"true", "é".encode(), "世界".encode(), "世".encode()[:2]]
SPELLINGS = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in SPECIAL.values()), *PIECES]
LONGEST_FIRST = sorted(range(len(SPELLINGS)), key=lambda token_id: -len(SPELLINGS[token_id]))


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a text, 257 begins one, the rest are `PIECES`."""

    bos = 257
    eod = 256
    vocab_size = len(SPELLINGS)

    def token_bytes(self, token_id: int) -> bytes:
        """Gives a token's bytes; a special token's are its spelling."""
        return SPELLINGS[token_id]

    def tokenize(self, text: str) -> list[int]:
        """Takes a special token's spelling for the token, and the longest pieces first."""
        encoded, ids = text.encode(), list[int]()
        while encoded:
            token_id = next(id_ for id_ in LONGEST_FIRST if encoded.startswith(SPELLINGS[id_]))
            ids.append(token_id)
            encoded = encoded[len(SPELLINGS[token_id]) :]
        return ids

    def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Gives the text of ids."""
        shown = [token for token in tokens if not (skip_special_tokens and token in SPECIAL)]
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")
