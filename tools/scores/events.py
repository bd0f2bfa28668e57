"""Link prediction on a stream of messages (CollegeMsg, DyGLib's UCI), beside the scores that DyGLib publishes.

    python -m tools.scores.published events DATA OUT --runs 10                # TGN and GraphMixer, ten seeds each
    python -m tools.scores.published events DATA OUT --only tgn --seed 3      # one of them; its result is saved for the others

Events in time order, 70 % for training, 15 % for validation, which selects the epoch, and 15 % for testing; a negative per
event; AP. As in DyGLib: batches of 200, the 10 (TGN) or 20 (GraphMixer) latest events of a node, dropout 0.1 and 0.4, time
encodings of 100 columns. Different: DyGLib trains for 100 epochs with a learning rate of 0.0001 and 172 columns. Its AP is the
mean of the APs of batches of 200 events, with negatives among the destinations of all events; here it is one AP of all events
of the split, with negatives among the destinations of training events. Each run's result is saved in OUT/kept, so a killed
command continues.

Published: random negatives, transductive (Yu et al., "Towards Better Dynamic Graph Learning", NeurIPS 2023): EdgeBank 76.20,
TGN 92.34, GraphMixer 93.25.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.graphs.temporal import store_of

PUBLISHED = {"EdgeBank": 76.20, "tgn": 92.34, "graphmixer": 93.25}
SETTINGS: dict[str, dict[str, Any]] = {
    "tgn": {"epochs": 50, "patience": 15},
    "graphmixer": {"epochs": 10, "patience": 5, "hidden": 64, "num_neighbors": [20], "dropout": 0.4},
}
"""of each model what differs from the defaults"""


def events(data: Path, out: Path, seeds: Sequence[int], only: str | None) -> dict[str, list[float]]:
    """Model -> test AP, in points, of each seed; also EdgeBank's, which is the same of every model."""
    store, found = store_of(data / "collegemsg" / "CollegeMsg.txt", out), dict[str, list[float]]()
    for model in SETTINGS if only is None else [only]:
        results = [_result(store, out, model, seed) for seed in seeds]
        found[model] = [each["ap"] for each in results]
        found["EdgeBank"] = [each["edgebank"] for each in results]
    return found


def _result(store: Path, out: Path, model: str, seed: int) -> dict[str, float]:
    """The scores of a run: those that were saved, or of a new one."""
    from ooc.config.events import EventsConfig
    from ooc.training.loop import train

    kept, run = out / "kept" / f"{model}-{seed}.json", out / f"{model}-{seed}"
    if not kept.exists():
        shutil.rmtree(run, ignore_errors=True)
        summary = train(EventsConfig(store=store, out=run, seed=seed, model=model, threads=1, **SETTINGS[model]))
        bank = summary["baselines"]["EdgeBank"]["test"]
        scores = {"ap": 100 * summary["metrics"]["test"]["ap"], "edgebank": 100 * bank["ap"]}
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(scores))
        shutil.rmtree(run)
        print(model, seed, scores, file=sys.stderr, flush=True)
    result: dict[str, float] = json.loads(kept.read_text())
    return result
