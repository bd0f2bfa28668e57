"""A learned importance of sources, after GRAPES (Younesian et al., 2024): a small graph network says what to draw.

The network sees the bipartite graph of a hop. A source's inputs are a sketch of its features (a random projection that stays in
memory, so that no row is read for a source that is not drawn), its edges in the hop, its in-degree and the hop; the mean of the
sketches of the nodes that it is a source of; and the mean, over these, of the mean of their sources. A perceptron makes of them
the logarithm of the source's importance.

It learns from the loss of the batches (REINFORCE): the gradient of the expected loss is the mean of (loss - baseline) times the
gradient of the logarithm of a draw's probability. Given the numbers of the others a source is drawn with probability
p = min(1, tau * importance), so its part of that is (drawn - p) times the gradient of its logit, as in conditional Poisson
sampling, and is 0 on average. The sampler computes this, a few hundred numbers, as it draws: nothing of a hop is kept for
training. GRAPES draws in the same way (Gumbel top-k), but counts (drawn - sigmoid(logit)), reads the features of all sources,
and gives edges no weights; GFlowNets, its other objective, are not here.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.sampling.importance import Floats, InEdges
from ooc.stores.arrays.rows import AnyArray, Ids, Rows
from ooc.stores.jit import kernel

SKETCH = 8
"""columns of the sketch"""
NODE_BYTES = 4 * SKETCH
"""in memory, for each node of the graph"""
HIDDEN = 16
INPUTS = 3 * SKETCH + 3
SIZE = INPUTS * HIDDEN + 2 * HIDDEN
"""parameters of the network"""
MOST_LOGIT = 6.0
"""logits are cut there, so that no source is all but never drawn"""
BYTES_A_SOURCE = 8 * (INPUTS + 2 * HIDDEN)
"""of its inputs and of what the network makes of them"""
_AT_ONCE = 2**24
"""bytes of feature rows that are projected at once"""


class Seen(NamedTuple):
    """What the network made of a hop's sources: its inputs [u, INPUTS], hidden rows [u, HIDDEN], importance [u]."""

    inputs: Floats
    hidden: Floats
    importance: Floats
    free: NDArray[np.bool_]
    """bool[u]: whether the logit was not cut"""


@dataclass(frozen=True)
class Policy:
    """The network. Its parameters are changed in place between batches that are sampled, never while some are.

    Args:
        sketch: float32[N, SKETCH], of all nodes.
        parameters: float64[SIZE].
    """

    sketch: NDArray[np.float32]
    parameters: Floats

    name: ClassVar[str] = "learned"

    @classmethod
    def begun(cls, sketch: NDArray[np.float32], seed: int) -> "Policy":
        """A network that finds all sources equally important."""
        parameters = np.zeros(SIZE)
        first = np.random.default_rng(seed).normal(size=INPUTS * HIDDEN) / np.sqrt(INPUTS)
        parameters[: INPUTS * HIDDEN] = first
        return cls(sketch, parameters)

    @property
    def layers(self) -> tuple[Floats, Floats, Floats]:
        """Views of the parameters: the first matrix [INPUTS, HIDDEN] and its bias, and the second vector [HIDDEN]."""
        split = INPUTS * HIDDEN
        return self.parameters[:split].reshape(INPUTS, HIDDEN), self.parameters[split:-HIDDEN], self.parameters[-HIDDEN:]

    def look(self, found: InEdges, node: Ids, degree: Ids, hop: int) -> Seen:
        """What the network makes of a hop's sources. node: int64[n], which it expands; degree: int64[u], of the sources."""
        inputs = np.zeros((len(found.node), INPUTS))
        propagate(found.indptr, found.source, self.sketch[found.node], self.sketch[node], inputs)
        inputs[:, -2], inputs[:, -1] = np.log1p(degree), hop
        first, bias, second = self.layers
        hidden = np.tanh(inputs @ first + bias)
        logit = hidden @ second
        return Seen(inputs, hidden, np.exp(np.clip(logit, -MOST_LOGIT, MOST_LOGIT)), np.abs(logit) < MOST_LOGIT)

    def score(self, seen: Seen, drawn: NDArray[np.bool_], last: float, tau: float) -> Floats:
        """The gradient of the logarithm of the draw's probability by the parameters, float64[SIZE], by the sources drawn.

        last, tau: the largest ratio that was drawn, and the smallest that was not. A source is drawn if its ratio is below all
        but `budget - 1` of the others': of one that was drawn that limit is tau, of another one `last`.
        """
        probability = np.minimum(1.0, np.where(drawn, tau, last) * seen.importance)
        surprise = (drawn - probability) * seen.free / max(1, int(drawn.sum()))
        inner = surprise[:, None] * self.layers[2] * (1 - seen.hidden**2)
        return np.concatenate([(seen.inputs.T @ inner).ravel(), inner.sum(0), surprise @ seen.hidden])


def sketch_of(rows: Rows, seed: int) -> NDArray[np.float32]:
    """A random projection of feature rows [N, f] to columns of deviation 1, float32[N, SKETCH]: one pass over the rows."""
    count, width = rows.shape[0], rows.shape[1]
    matrix = (np.random.default_rng(seed).normal(size=(width, SKETCH)) / np.sqrt(width)).astype(np.float32)
    found, step = np.empty((count, SKETCH), np.float32), max(1, _AT_ONCE // rows.row_bytes)
    for first in range(0, count, step):
        ids = np.arange(first, min(first + step, count))
        piece: AnyArray = np.empty((len(ids), width), rows.dtype)
        rows.read(ids, piece)
        found[first : first + len(ids)] = np.nan_to_num(piece.astype(np.float32)) @ matrix
    found -= found.mean(0, dtype=np.float64).astype(np.float32)
    found /= np.maximum(found.std(0, dtype=np.float64), 1e-12).astype(np.float32)
    return found


@kernel
def propagate(indptr: Ids, source: Ids, of_source: NDArray[np.float32], of_target: NDArray[np.float32], out: Floats) -> None:
    """Fill the inputs of a hop's sources (out [u, INPUTS], zeros before), but for the last two columns.

    Those are a source's own sketch, the mean of the sketches of the nodes that it is a source of, the mean over these of the
    mean sketch of their sources, and the logarithm of one more than its edges.
    """
    width = of_source.shape[1]
    mean, count = np.empty(width), np.zeros(out.shape[0])
    for i in range(len(indptr) - 1):
        degree = indptr[i + 1] - indptr[i]
        mean[:] = 0
        for e in range(indptr[i], indptr[i + 1]):
            for f in range(width):
                mean[f] += of_source[source[e], f] / degree
        for e in range(indptr[i], indptr[i + 1]):
            u = source[e]
            count[u] += 1
            for f in range(width):
                out[u, width + f] += of_target[i, f]
                out[u, 2 * width + f] += mean[f]
    for u in range(out.shape[0]):
        for f in range(width):
            out[u, f] = of_source[u, f]
            out[u, width + f] /= count[u]
            out[u, 2 * width + f] /= count[u]
        out[u, 3 * width] = np.log1p(count[u])
