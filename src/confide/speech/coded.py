"""Audio in AAC, as telephones record it (.m4a): libsndfile has no decoder for it, so PyAV reads it (extra `formats`).

The wheel of PyAV brings FFmpeg's libraries with it, so that no program beside Python is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confide.errors import require

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ENDINGS = (".m4a", ".aac", ".mp4")
_SLACK = 0.2  # seconds by which an intact file may decode to less than its header promises: a few frames of 1,024


class Undecodable(Exception):
    """A file whose samples cannot be read: missing, damaged, cut short, empty, or no audio at all."""


def is_coded(path: Path) -> bool:
    """Whether a file is read here, by its ending."""
    return path.suffix.lower() in ENDINGS


def seconds(path: Path) -> float:
    """The length of a file, from its header alone."""
    with _open(path) as (_, stream):
        return _promised(path, stream)


def decode(path: Path) -> tuple[NDArray[np.float32], int]:
    """Samples (n, channels) and their rate."""
    import av
    import numpy as np

    with _open(path) as (container, stream):
        rate, promised = int(stream.rate), _promised(path, stream)
        planar = av.AudioResampler(format="fltp")
        try:
            parts = [p.to_ndarray() for frame in container.decode(stream) for p in planar.resample(frame)]
        except (av.FFmpegError, ValueError) as error:
            raise Undecodable(f"truncated: {path.name} opens but does not decode ({error})") from None
    whole = np.concatenate(parts, axis=1) if parts else np.empty((1, 0))
    samples = whole.T.astype(np.float32)  # (samples, channels)
    if len(samples) / rate + _SLACK < promised:
        raise Undecodable(f"truncated: {path.name} holds {len(samples) / rate:.2f} of the {promised:.2f} s it promises")
    return samples, rate


@contextmanager
def _open(path: Path) -> Iterator[tuple[Any, Any]]:
    require("formats", f"the file {path.name}")
    import av

    if not path.is_file():
        raise Undecodable("missing: there is no such file")
    try:
        container = av.open(str(path))
    except (av.FFmpegError, ValueError, OSError):
        raise Undecodable("undecodable: no audio of a known format, or damaged at its beginning") from None
    with container:
        if not container.streams.audio:
            raise Undecodable("undecodable: the file has no sound in it")
        yield container, container.streams.audio[0]


def _promised(path: Path, stream: Any) -> float:
    if stream.duration is None or stream.time_base is None:
        raise Undecodable(f"undecodable: the header of {path.name} does not say how long it is; write it as .m4a anew")
    return float(stream.duration * stream.time_base)
