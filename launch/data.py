"""The text as tokens, and the batches of a step: a pure function of (seed, step, micro-batch, rank)."""

from __future__ import annotations

import errno
import stat
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distscale.config import Config
from distscale.errors import ConfigError

__all__ = ["Text", "load_text", "training_batch", "unigram_entropy", "validation_batch"]

NUM_BYTES = 256


@dataclass(frozen=True)
class Text:
    """A text, split once."""

    source: str
    """Where it came from, for people."""
    train: np.ndarray
    """Tokens, uint8 or uint16, shape (n,)."""
    validation: np.ndarray
    """The tokens after those of ``train``."""
    vocabulary: int
    """Every token is below it."""
    entropy: float
    """Unigram entropy of the whole text in nats: the loss of the best model that ignores context."""
    checksum: int
    """CRC-32 of the tokens, by which a resumed run knows its text."""


def load_text(config: Config) -> Text:
    """Reads and splits the text that ``config`` names.

    Raises:
        ConfigError: if it is missing, unreadable, empty, or too short for one sequence in each part.
    """
    tokens, source = _read_tokens(config.data.path)
    if not len(tokens):
        raise ConfigError(f"the text of {source} is empty; point data.path to a text file, a folder of them or a .bin")
    needed = config.model.sequence + 1
    num_validation = int(len(tokens) * config.data.validation)
    for part, length in (("training", len(tokens) - num_validation), ("validation", num_validation)):
        if length < needed:
            raise ConfigError(
                f"the {part} part of {source} has {length} of {len(tokens)} tokens, and a sequence needs "
                f"{needed}; give a longer text in data.path, a smaller model.sequence or another data.validation"
            )
    vocabulary = NUM_BYTES if tokens.dtype == np.uint8 else max(NUM_BYTES, int(tokens.max()) + 1)
    cut = len(tokens) - num_validation
    return Text(source, tokens[:cut], tokens[cut:], vocabulary, unigram_entropy(tokens), zlib.crc32(tokens))


def unigram_entropy(tokens: np.ndarray) -> float:
    """Returns the entropy, in nats, of the frequencies of ``tokens`` (unsigned, shape (n,), n > 0)."""
    counts = np.bincount(tokens)
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log(shares)).sum()) + 0.0


def training_batch(
    text: Text, seed: int, step: int, micro_batch: int, rank: int, size: int, sequence: int
) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets, int64, shape (size, sequence), on the CPU.

    Equal arguments give equal batches, so that the number of the step is all that a restart must know.
    """
    random = np.random.default_rng([seed, step, micro_batch, rank])
    starts = random.integers(0, len(text.train) - sequence, size=size)
    return _windows(text.train, starts, sequence)


def validation_batch(text: Text, index: int, num_batches: int, size: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Returns batch ``index`` of ``num_batches``, which together lie evenly over the validation text."""
    starts = np.linspace(0, len(text.validation) - sequence - 1, num_batches * size).astype(np.int64)
    return _windows(text.validation, starts[index * size : (index + 1) * size], sequence)


def _windows(tokens: np.ndarray, starts: np.ndarray, sequence: int) -> tuple[Tensor, Tensor]:
    windows = np.stack([tokens[start : start + sequence + 1] for start in starts]).astype(np.int64)
    both = torch.from_numpy(windows)
    return both[:, :-1], both[:, 1:]


def _read_tokens(path: str) -> tuple[np.ndarray, str]:
    if not path:
        library = Path(sysconfig.get_path("stdlib"))
        return _join(sorted(library.glob("*.py"))), f"the Python standard library ({library})"
    place = Path(path)
    source = str(place)
    try:
        mode = place.stat().st_mode
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise ConfigError(f"data.path = {path!r} cannot be read: {error.strerror}") from None
        raise ConfigError(
            f"data.path = {path!r} does not exist; give a text file, a folder of them or a .bin of uint16 "
            "tokens, or leave the key out to train on the Python standard library"
        ) from None
    # Reading a pipe or a device may never end.
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ConfigError(f"data.path = {path!r} is not a regular file or folder")
    if place.is_dir():
        return _join(
            sorted(file for file in place.rglob("*") if file.is_file() and _is_shown(file, place)), place
        ), source
    if place.suffix == ".bin":
        if place.stat().st_size % 2:
            raise ConfigError(f"{place} has an odd number of bytes, so it does not hold uint16 tokens")
        if not place.stat().st_size:
            return np.zeros(0, np.uint16), source
        return np.memmap(place, np.dtype("<u2"), mode="r"), source
    return _join([place]), source


def _is_shown(file: Path, folder: Path) -> bool:
    return not any(part.startswith(".") for part in file.relative_to(folder).parts)


def _join(files: list[Path], folder: Path | None = None) -> np.ndarray:
    """The bytes of all text files in order; a file with a zero byte is binary, by git's rule, so left out."""
    try:
        contents = [file.read_bytes() for file in files]
    except OSError as error:
        raise ConfigError(f"the text {error.filename} cannot be read: {error.strerror}") from None
    if folder and files and all(b"\0" in content for content in contents):
        raise ConfigError(f"the folder {folder} holds no text: all its files are binary, with zero bytes in them")
    if len(files) == 1 and b"\0" in contents[0]:
        raise ConfigError(f"{files[0]} is not a text: it has zero bytes; tokens belong in a .bin of uint16 numbers")
    return np.frombuffer(b"".join(content for content in contents if b"\0" not in content), np.uint8)
