"""The processes that train together, as far as the pure rooms need to know them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class World:
    """This process among its peers. Before a process group exists it is alone: rank 0 of 1."""

    @property
    def rank(self) -> int:
        """Index of this process, from 0."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def size(self) -> int:
        """Number of processes that train together."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value` in rank order, on every rank. All ranks must call it together."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def together(
        self,
        action: Callable[[], T],
        peer_error: type[Exception],
        *,
        as_own: type[Exception] | None = None,
        reason: Callable[[Exception], str] | None = None,
    ) -> T:
        """Run `action` on every rank and let all raise if one does: else the others would wait for it for ever.

        All ranks must call it together.

        Args:
            action: what to run; it may raise any Exception.
            peer_error: class of the error that a rank raises because another one failed.
            as_own: an error of this class is raised as one of this class by every rank.
            reason: from an error to a few words about it. With it the failed rank, too, raises `peer_error`, so all
                ranks raise the same: the reason of the first that failed, and its rank if there are several.

        Raises:
            Exception: this rank's own error, without `reason`.
            peer_error: another rank's error, with its rank and message; `as_own` if it was an `as_own`.
        """
        error: Exception | None = None
        failure: tuple[str, bool] | None = None
        try:
            result = action()
        except Exception as caught:  # whatever it is: the other ranks wait to hear of it
            error = caught
            alike = as_own is not None and isinstance(caught, as_own)
            failure = (reason(caught) if reason else f"{type(caught).__name__}: {caught}", alike)
        everyone = self.gather(failure)
        if error is not None and reason is None:
            raise error
        for rank, failure in enumerate(everyone):
            if failure is None:
                continue
            message, alike = failure
            if reason is None:
                message = f"rank {rank} failed: {message}"
            elif self.size > 1 and "(rank " not in message:  # an action that ran together itself has named the rank
                message = f"{message} (rank {rank})"
            raise (as_own if as_own is not None and alike else peer_error)(message)
        return result

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of every rank's `tensor`, on every rank. All ranks must call it together."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def own_of(self, saved: Sequence[T]) -> list[T]:
        """Return what this rank takes of a checkpoint's `saved`, one of each rank that wrote it.

        As many ranks take their own; of another number the first takes all, for what is added up over the ranks.
        """
        if len(saved) == self.size:
            return [saved[self.rank]]
        return list(saved) if self.rank == 0 else []

    def shard(self, items: Sequence[T]) -> list[T]:
        """Return this rank's contiguous share of `items`; sizes differ by at most one, nothing is dropped."""
        base, extra = divmod(len(items), self.size)
        start = self.rank * base + min(self.rank, extra)
        return list(items[start : start + base + (self.rank < extra)])


class HasWorld(Protocol):
    """Something that knows the processes it works among: the module, the data module."""

    @property
    def world(self) -> World:
        """This process among its peers."""
