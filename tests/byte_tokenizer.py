"""A tokenizer of single bytes and a few pairs, whose specials are spelled like text."""

from collections.abc import Sequence

SPECIAL = {256: "<|end|>", 257: "<|start|>"}
PIECES = [b'{"', b'":', b"ab", b"abc", b"true", "é".encode(), "世界".encode(), "世".encode()[:2]]


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a text, 257 begins one, the rest are `PIECES`."""

    bos = 257
    eod = 256
    vocab_size = 258 + len(PIECES)

    def token_bytes(self, token_id: int) -> bytes:
        """Gives a token's bytes; a special token's are its spelling."""
        if token_id in SPECIAL:
            return SPECIAL[token_id].encode()
        return bytes([token_id]) if token_id < 256 else PIECES[token_id - 258]

    def tokenize(self, text: str) -> list[int]:
        """Takes a special token's spelling for the token, and the longest pieces first."""
        known = {self.token_bytes(token_id): token_id for token_id in range(self.vocab_size)}
        encoded, ids = text.encode(), list[int]()
        while encoded:
            piece = max((piece for piece in known if encoded.startswith(piece)), key=len)
            ids.append(known[piece])
            encoded = encoded[len(piece) :]
        return ids

    def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Gives the text of ids."""
        shown = [token for token in tokens if not (skip_special_tokens and token in SPECIAL)]
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")
