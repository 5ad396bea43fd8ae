"""Texts are read and split as said, batches are pure functions of their place, and bad texts are refused."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import load_text, training_batch, unigram_entropy, validation_batch
from distscale import ConfigError
from distscale.config import Config


def config_for(path: Path | str, sequence: int = 4, validation: float = 0.5) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "test"},
            "model": {"sequence": sequence},
            "data": {"path": str(path), "validation": validation},
        }
    )


@pytest.fixture
def alphabet(tmp_path: Path) -> Path:
    path = tmp_path / "alphabet.txt"
    path.write_bytes(bytes(range(1, 201)))
    return path


def test_a_file_is_split_in_order(alphabet: Path) -> None:
    text = load_text(config_for(alphabet, validation=0.25))
    assert text.train.tolist() == list(range(1, 151))
    assert text.validation.tolist() == list(range(151, 201))
    assert text.vocabulary == 256
    assert text.entropy == pytest.approx(math.log(200))


def test_a_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"B" * 20)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_bytes(b"A" * 20)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"hidden")
    text = load_text(config_for(tmp_path))
    assert bytes(text.train) + bytes(text.validation) == b"A" * 20 + b"B" * 20


def test_the_default_is_the_standard_library() -> None:
    text = load_text(config_for("", sequence=128, validation=0.05))
    both = bytes(text.train) + bytes(text.validation)
    assert b"class ArgumentParser" in both
    assert len(both) > 1_000_000
    assert 2.5 < text.entropy < 4.0


def test_tokens_of_16_bits_raise_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.array([0, 1, 50_000, 3] * 10, dtype="<u2").tofile(path)
    text = load_text(config_for(path))
    assert text.vocabulary == 50_001
    inputs, _ = training_batch(text, 0, 0, 0, 0, 2, 4)
    assert set(inputs.flatten().tolist()) <= {0, 1, 50_000, 3}


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.txt", b"", "is empty"),
        ("empty.bin", b"", "is empty"),
        ("odd.bin", b"abc", "odd number of bytes"),
        ("nul.txt", b"a\0b" * 100, "is not a text: it has zero bytes"),
        ("short.txt", b"abcdefgh", "the training part of .* has 4 of 8 tokens, and a sequence needs 5"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        load_text(config_for(path))


def test_a_missing_path_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent' does not exist"):
        load_text(config_for(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="is empty"):
        load_text(config_for(tmp_path))


def test_a_folder_of_binaries_holds_no_text(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(ConfigError, match=r"the folder .* holds no text"):
        load_text(config_for(tmp_path))


def test_a_path_too_long_and_a_pipe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        load_text(config_for("x" * 5000))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a regular file or folder"):
        load_text(config_for(tmp_path / "pipe"))


def test_a_validation_part_shorter_than_a_sequence_is_refused(alphabet: Path) -> None:
    with pytest.raises(ConfigError, match=r"the validation part of .* has 2 of 200 tokens"):
        load_text(config_for(alphabet, validation=0.01))


def test_the_shortest_text_that_is_accepted_gives_batches(tmp_path: Path) -> None:
    path = tmp_path / "ten.txt"
    path.write_bytes(b"0123456789")
    text = load_text(config_for(path))
    inputs, targets = training_batch(text, 0, 0, 0, 0, 3, 4)
    assert inputs.tolist() == [list(b"0123")] * 3
    assert targets.tolist() == [list(b"1234")] * 3
    assert validation_batch(text, 0, 1, 2, 4)[1].tolist() == [list(b"6789")] * 2


@given(seed=st.integers(0, 2**31), step=st.integers(0, 10**6), micro=st.integers(0, 9), rank=st.integers(0, 63))
def test_a_batch_depends_on_its_place_alone(seed: int, step: int, micro: int, rank: int) -> None:
    text = load_text(_long_text())
    inputs, targets = training_batch(text, seed, step, micro, rank, 3, 16)
    again, _ = training_batch(text, seed, step, micro, rank, 3, 16)
    assert inputs.equal(again)
    assert inputs[:, 1:].equal(targets[:, :-1])
    # 48 places out of thousands: two batches that are equal come from equal places.
    for other in ((seed + 1, step, micro, rank), (seed, step + 1, micro, rank)):
        assert not inputs.equal(training_batch(text, *other, 3, 16)[0])
    for other in ((seed, step, micro + 1, rank), (seed, step, micro, rank + 1)):
        assert not inputs.equal(training_batch(text, *other, 3, 16)[0])


def _long_text() -> Config:
    return config_for(Path(np.__file__).parent / "lib", sequence=16)


def test_every_start_is_drawn_and_none_beyond_the_end(alphabet: Path) -> None:
    text = load_text(config_for(alphabet))
    starts = {start for step in range(60) for start in training_batch(text, 0, step, 0, 0, 20, 4)[0][:, 0].tolist()}
    assert starts == set(range(1, 97))


def test_validation_batches_cover_the_text_the_same_on_any_number_of_ranks(alphabet: Path) -> None:
    text = load_text(config_for(alphabet))
    inputs = [validation_batch(text, index, 4, 5, 4)[0] for index in range(4)]
    firsts = [start for batch in inputs for start in batch[:, 0].tolist()]
    assert firsts == sorted(firsts)
    assert (firsts[0], firsts[-1]) == (101, 196)


@given(st.lists(st.integers(0, 255), min_size=1))
def test_the_entropy_is_that_of_the_frequencies(values: list[int]) -> None:
    shares = [values.count(value) / len(values) for value in set(values)]
    expected = -sum(share * math.log(share) for share in shares)
    assert unigram_entropy(np.array(values, np.uint8)) == pytest.approx(expected, abs=1e-12)
