"""The batches of mode "lightgcn": links, and the nodes that they are compared with."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ooc.config.lightgcn import LightGCNConfig
from ooc.loading.relation_links import RelationLinks
from ooc.runtime.keyed_random import Cursor, Purpose, key, seeds_of, steps_of
from ooc.sampling.bucket_draws import drawn_nodes
from ooc.sampling.links import EdgeLookup
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import Ids


class LinkBatch(NamedTuple):
    """Links of a step: the nodes that they and their negatives have, each once, and where theirs are among these."""

    node: Ids
    source: Tensor
    """int64[b]"""
    target: Tensor
    negative: Tensor
    """int64[b, ratio], or int64[ratio] where the batch shares them"""


class LinkBatches:
    """The batches of a run, each a function of (seed, epoch, step).

    Args:
        config: The settings.
        links: All of the store.
        train: Slots of those to train on.

    >>> batches.of(epoch=0, step=3).node
    """

    def __init__(self, config: LightGCNConfig, links: RelationLinks, train: Members) -> None:
        (part,) = links.parts
        self.config, self.links, self._train = config, links, train
        self._lookup = EdgeLookup(part.edges.graph)

    @property
    def num_links(self) -> int:
        """To train on."""
        return len(self._train)

    @property
    def steps_per_epoch(self) -> int:
        return steps_of(len(self._train), self.config.batch_size)

    @property
    def most_nodes(self) -> int:
        """Of a batch."""
        size = min(self.num_links, self.config.batch_size)
        return min(self.links.num_nodes, 2 * size + self._negatives(size))

    def of(self, epoch: int, step: int) -> LinkBatch:
        config, links = self.config, self.links
        slot = self._train[seeds_of(self._train, Cursor(epoch, step), config.batch_size, True, config.seed)]
        source, target = self._lookup.ends(slot)
        source, target = source + links.heads.start, target + links.tails.start
        draw = key(config.seed, Purpose.NEGATIVE, epoch, step)
        negative = drawn_nodes(draw, self._negatives(len(slot)), np.zeros(1, np.int64), 1, links.tails)
        node, place = np.unique(np.concatenate([source, target, negative]), return_inverse=True)
        first, second, third = np.split(place, [len(slot), 2 * len(slot)])
        shape = (-1,) if config.loss == "softmax" else (len(slot), config.ratio)
        return LinkBatch(node, torch.from_numpy(first), torch.from_numpy(second), torch.from_numpy(third.reshape(shape)))

    def _negatives(self, links: int) -> int:
        """Of a batch of so many links."""
        return self.config.ratio * (1 if self.config.loss == "softmax" else links)
