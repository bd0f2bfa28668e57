"""Regularization of the rows that a batch of links trains: N3 and L2."""

from typing import Literal, get_args

from torch import Tensor

from ooc.models.link_scores import LinkScorer
from ooc.stores.errors import ConfigError

RegularizerName = Literal["n3", "l2"]
_POWERS = {"n3": 3, "l2": 2}


class LinkRegularizer:
    """A penalty on the rows of a batch's links, head, relation and tail: the sum of their components' powers, a link's mean.

    "n3" is the third power, complex components by their modulus (Lacroix et al., 2018), "l2" the second. A row is penalized as
    often as it is in a link, so the rows of rare nodes are free to be large.

    Args:
        name: Which one.
        weight: Of the penalty.

    Raises:
        ConfigError: The name is unknown.

    >>> LinkRegularizer("n3", 0.1)(scorer, head, tail, scorer.relations_of(relation))
    """

    def __init__(self, name: str = "n3", weight: float = 0.0) -> None:
        if name not in get_args(RegularizerName):
            raise ConfigError(f"regularizer {name!r} is unknown: use one of {', '.join(get_args(RegularizerName))}")
        self.power, self.weight = _POWERS[name], weight

    def __call__(self, scorer: LinkScorer, head: Tensor, tail: Tensor, relation: Tensor | None = None) -> Tensor:
        """The penalty: a scalar.

        Args:
            scorer: What scores the links.
            head: Rows, [b, width].
            tail: Rows, [b, width].
            relation: Rows, [b, relation_width]; None: none are penalized, as where they are phases.
        """
        rows = [head, tail] if relation is None else [head, tail, relation]
        total = sum((scorer.powers(each, self.power) for each in rows), head.new_zeros(()))
        return total * (self.weight / max(1, len(head)))
