"""Hidden states that are computed once and then read from disk (CAR section 6.4: only the head trains).

When the adapter does not train, a text's vector never changes, so an epoch need not run the encoder. Vectors are kept
text by text, in a folder named after the encoder's identity (weights, tokeniser, pooling, tokens to a window), so
another split, another seed or a larger corpus computes only what is new.

A folder holds blocks: a matrix that is memory-mapped, and beside it the digests of its texts with a checksum. The
digests are written last and atomically, so a block is there or it is not, a run that was stopped goes on where it was,
and two processes at once do no harm but work. A damaged block is left out and computed again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from confide.encoders.encoder import Encoder
from confide.errors import UserError
from confide.files import cache_folder, make_folder, write_atomically
from confide.progress import Reporter

_DIGEST = 16  # bytes
# Enough tokens to a batch to keep a processor busy, few enough to stay in its cache; padding counts.
BATCH_TOKENS = 2048
# A stopped run loses at most so many texts.
_BLOCK_TEXTS = 512


@dataclass
class HiddenStates:
    """Reads the vectors of a list of texts from the blocks that hold them."""

    width: int
    _blocks: list[NDArray[np.float32]]  # each (texts of the block, width), memory-mapped
    _block: NDArray[np.int64]  # (texts,) which block
    _row: NDArray[np.int64]  # (texts,) which of its rows

    def __len__(self) -> int:
        return len(self._block)

    def rows(self, indices: Sequence[int] | NDArray[np.int64] | None = None) -> Tensor:
        """Read the vectors of the chosen texts, or of all, in this order."""  # (n, width)
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)
        result = np.empty((len(chosen), self.width), dtype=np.float32)
        block, row = self._block[chosen], self._row[chosen]
        for number in np.unique(block):
            here = block == number
            result[here] = self._blocks[number][row[here]]
        return torch.from_numpy(result)


def hidden_states(
    encoder: Encoder, texts: Sequence[str], folder: Path | None = None, quiet: bool = False,
    batch_tokens: int = BATCH_TOKENS,
) -> HiddenStates:  # fmt: skip
    """Compute the vectors without an adapter that `folder` (none: the cache) does not hold yet, and open them all."""
    place = (folder or cache_folder() / "states").expanduser() / encoder.identity[:32]
    make_folder(place)
    known, blocks = _read(place, encoder.width)
    wanted = [_digest(text) for text in texts]
    missing = {digest: text for digest, text in zip(wanted, texts, strict=True) if digest not in known}
    if missing:
        _compute(encoder, place, missing, batch_tokens, quiet, done=len(set(wanted)) - len(missing))
        known, blocks = _read(place, encoder.width)
    where = np.array([known[digest] for digest in wanted], dtype=np.int64).reshape(-1, 2)
    return HiddenStates(encoder.width, blocks, where[:, 0], where[:, 1])


def batches_by_length(lengths: NDArray[np.int64], batch_tokens: int = BATCH_TOKENS) -> Iterator[NDArray[np.int64]]:
    """Batch indices by similar lengths, so that little of a batch is padding; the longest come first.

    A batch's texts times its longest is at most `batch_tokens`, unless one text alone is longer. Longest first: if
    the memory does not suffice, it shows at once, and the time left is over-estimated rather than under-estimated.
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        count = max(1, batch_tokens // max(1, longest))
        yield order[start : start + count]
        start += count


def _compute(
    encoder: Encoder, place: Path, missing: dict[bytes, str], batch_tokens: int, quiet: bool, done: int
) -> None:
    digests, texts = list(missing), list(missing.values())
    held: list[NDArray[np.float32]] = []
    names: list[bytes] = []
    windowed = cut = 0
    with Reporter("hidden states", done + len(texts), done=done, quiet=quiet) as reporter, torch.no_grad():
        for batch in batches_by_length(encoder.lengths(texts), batch_tokens):
            tokens = encoder.tokens([texts[i] for i in batch])
            windowed, cut = windowed + tokens.windowed, cut + tokens.cut
            held.append(encoder.hidden(tokens).numpy().astype(np.float32, copy=False))
            names += [digests[i] for i in batch]
            reporter.done += len(batch) - 1
            reporter.advance(f"{tokens.ids.shape[1]} tokens")
            if len(names) >= _BLOCK_TEXTS:
                _write(place, names, np.concatenate(held))
                held, names = [], []
    if names:
        _write(place, names, np.concatenate(held))
    if windowed and not quiet:
        also = f"; {cut} of them go beyond {encoder.settings.max_windows} windows and are cut" if cut else ""
        print(
            f"{windowed} of {len(texts)} texts are longer than {encoder.max_tokens} tokens: read in windows{also}",
            file=sys.stderr,
        )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST).digest()


def _write(place: Path, names: list[bytes], vectors: NDArray[np.float32]) -> None:
    if not np.isfinite(vectors).all():
        raise UserError(
            "the encoder gave a vector that is not finite; expected numbers: its weights are damaged or do not belong "
            "to its configuration: install it again"
        )
    joined = b"".join(names)
    stem = hashlib.blake2b(joined, digest_size=_DIGEST).hexdigest()
    matrix = io.BytesIO()
    np.save(matrix, vectors)
    content = matrix.getvalue()
    head = json.dumps({"texts": len(names), "vectors": zlib.crc32(content), "digests": zlib.crc32(joined)}).encode()
    try:
        write_atomically(place / f"{stem}.npy", content, f".{os.getpid()}.tmp")
        write_atomically(place / f"{stem}.texts", head + b"\n" + joined, f".{os.getpid()}.tmp")
    except OSError as error:
        raise UserError(
            f"cannot write hidden states to {place} ({error.strerror}); expected a folder that can be written to with "
            f"{len(content) / 1e6:.1f} MB free: make room or name another cache folder, then start again; what is "
            "there already is kept"
        ) from error


def _read(place: Path, width: int) -> tuple[dict[bytes, tuple[int, int]], list[NDArray[np.float32]]]:
    """Find where each known text is, and open the blocks; leave out damaged ones."""
    known: dict[bytes, tuple[int, int]] = {}
    blocks: list[NDArray[np.float32]] = []
    for path in sorted(place.glob("*.texts")):
        try:
            line, _, joined = path.read_bytes().partition(b"\n")
            head = json.loads(line)
            matrix_path = path.with_suffix(".npy")
            if zlib.crc32(joined) != head["digests"] or zlib.crc32(matrix_path.read_bytes()) != head["vectors"]:
                continue
            vectors = np.load(matrix_path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if vectors.shape != (head["texts"], width) or len(joined) != _DIGEST * head["texts"]:
            continue
        for row in range(head["texts"]):
            known[joined[row * _DIGEST : (row + 1) * _DIGEST]] = (len(blocks), row)
        blocks.append(vectors)
    return known, blocks
