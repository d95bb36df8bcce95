"""Stop strings as automata over tokens, so that neither an engine nor the driver decodes text while it samples.

Determines the bytes of each token of a vocabulary, and compiles the automata; actors.engine.stopping runs them.
Matching uses the response's concatenated bytes: a string may start and end inside tokens, and the token that completes
it is kept whole, as sampled. In stop strings, special tokens have their own text as bytes.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from actors.data.errors import DataError
from actors.data.tokenizers import Tokenizer
from contracts.rollout import Marker

KEY = "rollout.sampling.stop_strings"
_MOST = 1 << 16  # limit of states, and of kinds of tokens: a Marker numbers them by uint16


def stop_strings(strings: Sequence[str], tokenizer: Tokenizer) -> Marker:
    """Return a marker that is found as soon as one of `strings` is in a response. Raises DataError if the tokenizer's
    tokens are not bytes."""
    if not all(strings):
        raise DataError(f"{KEY}: an empty string would end every response at its first token")
    return compile_marker([string.encode() for string in strings], vocabulary_bytes(tokenizer))


def compile_marker(patterns: Sequence[bytes], vocabulary: Sequence[bytes]) -> Marker:
    """Compile byte patterns. `vocabulary[token]`: the token's bytes."""
    return marker_over_tokens(_over_bytes(patterns), vocabulary)


def marker_over_tokens(automaton: NDArray[np.int64], vocabulary: Sequence[bytes], key: str = KEY) -> Marker:
    """Compile an automaton over bytes to tokens. `automaton`: [S, 256], the state after each byte; the last is final.
    `vocabulary[token]`: the token's bytes. Raises DataError, which names `key`, if there are more states or kinds of
    tokens than a Marker can number."""
    _check_size(len(automaton), "states", vocabulary, key)
    moves, rest, kind = _over_tokens(automaton, vocabulary)
    listed = np.flatnonzero(kind != rest).astype(np.int32)
    rows, kinds = np.unique(kind[listed], return_inverse=True)
    _check_size(len(rows), "kinds of tokens", vocabulary, key)
    parts = listed, kinds.astype(np.uint16), moves[rows], moves[rest]
    return Marker(hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=16).digest(), *parts)


def _check_size(count: int, what: str, vocabulary: Sequence[bytes], key: str) -> None:
    if count > _MOST:
        raise DataError(
            f"{key}: over the {len(vocabulary)} tokens of this tokenizer (model.tokenizer) it takes {count} {what} to "
            f"find it, and at most {_MOST} can be numbered; look for fewer or shorter texts"
        )


def vocabulary_bytes(tokenizer: Tokenizer, key: str = KEY, *, decoded: bool = False) -> list[bytes]:
    """Return every token's bytes, by id; b"" for ids without a token. `decoded`: as in the text that rewards read, so
    b"" for special tokens. Raises DataError, which names `key`, if the tokenizer's tokens are not bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str()).get("decoder") if backend is not None else None
    kinds = _kinds(decoder)
    read: Callable[[str], bytes]
    if "ByteLevel" in kinds:
        read = partial(_byte_level, _byte_letters())
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        read = _sentencepiece
    elif kinds == {"Fuse"}:
        read = str.encode
    else:
        raise DataError(
            f"{key}: only byte-level and SentencePiece tokenizers define the bytes of a token, but this one "
            f"decodes by {', '.join(sorted(kinds)) or 'nothing'}; use rollout.sampling.stop_token_ids"
        )
    added = {int(i): str(token.content) for i, token in tokenizer.added_tokens_decoder.items()}
    skipped = special_tokens(tokenizer) if decoded else {}
    ids = tokenizer.get_vocab()
    found = [b""] * (max(ids.values(), default=-1) + 1)
    for token, i in ids.items():
        if i not in skipped:
            found[i] = added[i].encode() if i in added else read(token)
    return found


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the tokens that are no part of a decoded response (skip_special_tokens), by their ids."""
    return {int(i): str(token.content) for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def _kinds(decoder: object) -> set[str]:
    """Return the types of a tokenizer's decoder and of its parts."""
    if not isinstance(decoder, dict):
        return set()
    inner: set[str] = set().union(*(_kinds(part) for part in decoder.get("decoders", ())))
    return inner | {str(decoder.get("type"))} - {"Sequence"}


def _byte_letters() -> dict[str, int]:
    """Return the printable characters by which byte-level BPE writes bytes (Radford et al., 2019): printable Latin-1
    characters for themselves, the characters from U+0100 on for the others, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(0x100) if byte not in printable]
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _byte_level(letters: Mapping[str, int], token: str) -> bytes:
    return b"".join(bytes([letters[c]]) if c in letters else c.encode() for c in token)


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _over_bytes(patterns: Sequence[bytes]) -> NDArray[np.int64]:
    """Return [S, 256]: an automaton (Aho and Corasick, 1975) whose last state is reached with the first complete
    pattern."""
    if not patterns or not all(patterns):
        raise ValueError("a stop string must not be empty")
    prefixes = sorted({p[:n] for p in patterns for n in range(len(p))}, key=lambda p: (len(p), p))
    number = {prefix: i for i, prefix in enumerate(prefixes)}  # b"" is 0
    last = len(prefixes)
    moves = np.zeros((last + 1, 256), np.int64)
    moves[last] = last
    for prefix, state in number.items():
        for byte in range(256):
            text = prefix + bytes([byte])
            if any(text.endswith(p) for p in patterns):
                moves[state, byte] = last
            else:
                longest = next(text[i:] for i in range(len(text) + 1) if text[i:] in number)
                moves[state, byte] = number[longest]
    return moves


def _over_tokens(
    automaton: NDArray[np.int64], vocabulary: Sequence[bytes]
) -> tuple[NDArray[np.uint16], int, NDArray[np.int64]]:
    """Return ([K, S]: state transitions of each kind of token; the most frequent kind; [V]: each token's kind)."""
    table, begin = automaton.astype(np.uint16), np.arange(len(automaton), dtype=np.uint16)
    number: dict[bytes, int] = {}
    kinds: list[NDArray[np.uint16]] = []
    kind = np.empty(len(vocabulary), np.int64)
    for token, text in enumerate(vocabulary):
        states = begin
        for byte in text:
            states = table[states, byte]
        packed = states.tobytes()
        if packed not in number:
            number[packed] = len(kinds)
            kinds.append(states)
        kind[token] = number[packed]
    return np.array(kinds), int(np.bincount(kind).argmax()), kind
