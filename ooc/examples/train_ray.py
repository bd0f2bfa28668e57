"""Train in several processes under Ray Train: a script to copy and change.

    ooc example train_ray > train_ray.py
    python train_ray.py papers.ooc --workers 2 --epochs 5
    python train_ray.py /shared/papers.ooc --workers 8 --gpu        # on a cluster of Ray, whose machines all see the store

Each worker opens the store and has its share of every batch: the loader finds the process group that Ray has made. The loss is
the mean over all workers. It needs `pip install 'ray[train]'`.
"""

import argparse
import os
from typing import Any

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import distributed
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GraphSAGE

import ooc


def train(config: dict[str, Any]) -> None:
    """What each worker does."""
    device = get_device()
    ds = ooc.open(config["store"], memory=config["memory"])
    loader = ooc.NeighborLoader(
        ds, num_neighbors=[10, 10], input_nodes="train", batch_size=config["batch_size"], shuffle=True, device=device
    )
    model = prepare_model(GraphSAGE(ds.num_node_features, 128, num_layers=2, out_channels=ds.num_classes))
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    for epoch in range(config["epochs"]):
        sums = torch.zeros(2, device=device)
        loader.stop_before(loader.shared_steps)  # a last step of fewer nodes than workers
        for batch in loader:
            optimizer.zero_grad()
            error = cross_entropy(model(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size])
            error.backward()
            optimizer.step()
            sums += torch.stack([error.detach(), torch.ones_like(error)])
        distributed.all_reduce(sums)
        loss = (sums[0] / sums[1]).item()
        ray.train.report({"epoch": epoch, "loss": loss})
        if distributed.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)
    ds.close()


def main() -> None:
    """Start the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=1024, help="of a worker")
    parser.add_argument("--memory", default="4GB", help="of a worker")
    a = parser.parse_args()
    if "://" not in a.store:
        a.store = os.path.abspath(a.store)  # workers have a folder of their own
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(a),
        scaling_config=ScalingConfig(num_workers=a.workers, use_gpu=a.gpu),
        run_config=RunConfig(name="ooc"),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
