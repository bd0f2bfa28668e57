"""Models of event streams against rows computed node by node from the raw events."""

from pathlib import Path

import numpy as np
import torch

import ooc
from ooc.sampling.negatives import RandomNegatives
from ooc.temporal.event_models import GraphMixer, Sizes
from tests.ooc.temporal_stores import Edges

LATEST = 6


def test_the_mixer_has_the_latest_event_in_its_last_token(tmp_path: Path) -> None:
    """However short a node's past is, so that a token means the same of every node."""
    edges = Edges()
    ds = ooc.open(edges.store(tmp_path, undirected=True))
    loader = ooc.EventLoader(ds, 24, num_neighbors=[LATEST], negatives=RandomNegatives(0, 30), features=False)
    torch.manual_seed(0)
    model = GraphMixer(Sizes(features=0, msg=3, hidden=8, time=4), ("msg",), latest=LATEST).double().eval()
    lengths = set()
    for batch in list(loader)[1:4]:
        rows = model(batch)[0]
        asked, times = torch.cat([batch.src, batch.dst, batch.neg_dst]), batch.t.repeat(3)
        for row, node, time in zip(rows, asked.tolist(), times.tolist(), strict=True):
            past = np.flatnonzero(((edges.src == node) | (edges.dst == node)) & (edges.time < time))
            past = past[np.argsort(edges.time[past], kind="stable")][-LATEST:]
            lengths.add(len(past))
            tokens = torch.zeros(LATEST, 8, dtype=torch.float64)
            if len(past):
                age = model.time_enc(torch.from_numpy(time - edges.time[past]))
                msg = torch.from_numpy(edges.msg[past]).double().asinh()
                tokens[LATEST - len(past) :] = model.links(torch.cat([age, msg], dim=1))
            expected = model.out(model.norm(model.mixers(tokens[None])).mean(1))[0]
            torch.testing.assert_close(row, expected, rtol=1e-9, atol=1e-9)
    assert len(lengths) == LATEST + 1, "pasts of all lengths"
