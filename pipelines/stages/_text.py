"""Stages that turn text into numbers."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.stages._sample import Sample, Transform, get_value

# A run of letters, digits and underscores, with the apostrophes inside it: "don't" is one word.
WORD = re.compile(r"\w+(?:'\w+)*")
# Ids below are kept for padding (0) and for what the vocabulary does not know (1).
FIRST_ID = 2


@known_as("pipelines.stages.tokenize")
@dataclass(frozen=True)
class Tokenize(Transform):
    """See `tokenize`."""

    field: str
    vocabulary: tuple[str, ...]
    unknown: int
    lowercase: bool

    def __call__(self, sample: Sample) -> Sample:
        text = get_value(sample, self.field)
        if isinstance(text, bytes):
            try:
                text = text.decode()
            except UnicodeDecodeError as error:
                raise PipelineError(f"field {self.field!r} holds bytes that are not UTF-8: {error}") from None
        if not isinstance(text, str):
            raise PipelineError(f"field {self.field!r} holds {type(text).__name__}, not a text")
        id_of, unknown = self._id_by_word.get, self.unknown
        words = WORD.findall(text.lower() if self.lowercase else text)
        return {**sample, self.field: np.array([id_of(word, unknown) for word in words], np.int64)}

    @functools.cached_property
    def _id_by_word(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.vocabulary, FIRST_ID)}


def tokenize(field: str, vocabulary: Sequence[str], unknown: int = 1, lowercase: bool = True) -> Tokenize:
    """Turns a text into the ids of its words, int64 [words]; follow with `pad`.

    A word is a run of letters, digits and underscores, including apostrophes inside it.

    Args:
        field: holds the text (str, or UTF-8 bytes), then the ids.
        vocabulary: distinct words; the id of each is its position + 2. Id 0 is reserved for padding.
        unknown: the id of a word that is not in the vocabulary.
        lowercase: whether to convert the text to lower case first.

    Raises:
        PipelineError: the vocabulary is empty, not a sequence of words, or has a word twice.

    Examples:
        >>> tokenize("text", ["the", "film"])({"text": "The film, again"})
        {'text': array([2, 3, 1])}
    """
    words = () if isinstance(vocabulary, str) else tuple(vocabulary)
    if not words or not all(isinstance(word, str) for word in words):
        raise PipelineError(f"tokenize: vocabulary must be a sequence of words, got {vocabulary!r:.60}")
    if len(set(words)) < len(words):
        twice = next(word for word, count in Counter(words).items() if count > 1)
        raise PipelineError(f"tokenize: the vocabulary has the word {twice!r} twice")
    return Tokenize(field, words, int(unknown), bool(lowercase))


def build_vocabulary(texts: Iterable[str], size: int, lowercase: bool = True) -> tuple[str, ...]:
    """Collects the most frequent words of texts, for `tokenize`.

    Args:
        texts: the texts of the training records, such as `(record["text"] for record in source)`.
        size: largest number of words; with the two reserved ids, an embedding needs `size + 2` rows.
        lowercase: as in `tokenize`.

    Returns:
        At most `size` words, the most frequent first, equally frequent ones in alphabetical order.

    Raises:
        PipelineError: `texts` is a single text, or `size` is below 1.
    """
    if isinstance(texts, str):
        raise PipelineError("build_vocabulary: texts must be a sequence of texts, got one text")
    if size < 1:
        raise PipelineError(f"build_vocabulary: size must be at least 1, got {size!r}")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(WORD.findall(text.lower() if lowercase else text))
    return tuple(sorted(counts, key=lambda word: (-counts[word], word))[:size])
