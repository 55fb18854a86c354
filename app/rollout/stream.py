"""The order in which prompts are asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.rollout.collector import row_seed
from app.types import Prompt


class PromptStream:
    """An endless walk over the prompts, shuffled anew each epoch; any position can be reached directly."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.prompts = prompts
        self.seed = seed
        self._epoch, self._order = -1, list(range(len(prompts)))

    def at(self, position: int) -> Prompt:
        """Return the prompt at a position, from 0."""
        epoch, index = divmod(position, len(self.prompts))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(row_seed(self.seed, epoch))
            self._epoch, self._order = epoch, torch.randperm(len(self.prompts), generator=generator).tolist()
        return self.prompts[self._order[index]]
