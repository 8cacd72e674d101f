"""`StreamPacker`: packs a stream of documents with a bounded buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from torch.utils.data import get_worker_info

from flexvarlen.layout.arguments import as_int
from flexvarlen.packing.pack import pack

Document = TypeVar("Document")


class StreamPacker(Generic[Document]):
    """Packs a stream of documents into rows, using a bounded buffer.

    Documents are collected in a buffer. When it is full, they are packed best fit decreasing. The
    row of the oldest document and the fullest other rows, half of all rows, are yielded; the other
    documents stay in the buffer.

    Args:
        capacity: number of tokens in a row.
        buffer: maximum number of buffered documents; a larger buffer fills the rows better.
        length: function that returns the number of tokens of a document, from 1 to `capacity`.

    Attributes:
        num_given: number of documents consumed; a stream resumes after them. Reset to 0 when
            the whole stream has been yielded.

    >>> packer = StreamPacker(8, buffer=4, length=len)
    >>> ["".join(row) for row in packer.pack(["abcde", "fgh", "ijkl", "mn", "opqr"])]
    ['abcdefgh', 'ijklopqr', 'mn']
    """

    def __init__(
        self, capacity: int, *, buffer: int = 8192, length: Callable[[Document], int]
    ) -> None:
        if (as_int(buffer) or 0) < 1:
            raise ValueError(
                f"buffer must be an integer of at least 1, got {buffer!r}; pass the number of "
                "documents to buffer."
            )
        pack([], capacity)  # validates capacity
        if not callable(length):
            raise ValueError(
                f"length must be a function that returns a document's tokens, got {length!r:.80}; "
                "pass len, or one of your own."
            )
        self.capacity, self.buffer, self._length = int(capacity), int(buffer), length
        self.num_given = 0
        self._waiting: list[Document] = []  # the oldest first
        self._ready: list[list[Document]] = []  # rows to yield next

    def pack(
        self, documents: Iterable[Document], *, worker_share: bool = False
    ) -> Iterator[list[Document]]:
        """Yield the packed rows of a stream; each document is in exactly one row.

        Args:
            documents: the stream.
            worker_share: whether the stream is already sharded for this `DataLoader` worker;
                otherwise each worker would pack a copy of the whole dataset.

        Raises:
            ValueError: a document's length is below 1 or above `capacity` (earlier ones stay
                buffered), or there are several workers without `worker_share=True`.
        """
        worker = None if worker_share else get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                "documents must be a shard of the stream if several DataLoader workers pack, got "
                f"no worker_share=True in {worker.num_workers} of them; pass "
                f"islice(documents, get_worker_info().id, None, {worker.num_workers}) and "
                "worker_share=True, or use one worker."
            )
        yield from self._hand_out()
        for document in documents:
            if not 1 <= (length := self._length(document)) <= self.capacity:
                pack([length], self.capacity)  # raises, before the document is counted
            self.num_given += 1
            self._waiting.append(document)
            if len(self._waiting) >= self.buffer:
                self._make_ready()
                yield from self._hand_out()
        while self._waiting:
            self._make_ready()
            yield from self._hand_out()
        self.num_given = 0

    def skip(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Skip the documents of a restarted stream that were already consumed.

        Raises:
            ValueError: the stream has fewer documents than were consumed.
        """
        iterator = iter(documents)
        for done in range(self.num_given):
            try:
                next(iterator)
            except StopIteration:
                raise ValueError(
                    f"documents must be the stream that the state was saved for, at least "
                    f"{self.num_given} long, got {done}; load the state of this stream."
                ) from None
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Return a state from which the stream resumes with the rows of an uninterrupted run.

        May be called between any two rows. The state contains the buffered documents themselves:
        pass indices as documents to keep it small.
        """
        return {
            "capacity": self.capacity,
            "buffer": self.buffer,
            "num_given": self.num_given,
            "waiting": list(self._waiting),
            "ready": [list(row) for row in self._ready],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. Then resume with `packer.pack(packer.skip(documents))`.

        Raises:
            ValueError: the state has another capacity or buffer.
        """
        for name, mine in (("capacity", self.capacity), ("buffer", self.buffer)):
            if state[name] != mine:
                raise ValueError(
                    f"state must be of {name} {mine}, got {state[name]}; make the packer with that "
                    f"{name}, or restart the stream."
                )
        self.num_given = state["num_given"]
        self._waiting = list(state["waiting"])
        self._ready = [list(row) for row in state["ready"]]

    def _make_ready(self) -> None:
        """Pack the buffer and move half of its rows to `_ready`, the oldest document's first."""
        lengths = [self._length(document) for document in self._waiting]
        rows = pack(lengths, self.capacity)
        rows.sort(key=lambda row: (0 not in row, -sum(lengths[index] for index in row)))
        rows = rows[: (len(rows) + 1) // 2]
        gone = {index for row in rows for index in row}
        self._ready = [[self._waiting[index] for index in row] for row in rows]
        self._waiting = [each for i, each in enumerate(self._waiting) if i not in gone]

    def _hand_out(self) -> Iterator[list[Document]]:
        while self._ready:
            yield self._ready.pop(0)
