"""PyG's GraphSAGE on an OGB data set: trained and scored on sampled neighborhoods."""

import torch
import torch.nn.functional as F
from ogb.nodeproppred import PygNodePropPredDataset
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE

dataset = PygNodePropPredDataset("ogbn-products", root="data")
data, split = dataset[0], dataset.get_idx_split()
fanout, batch_size = [10, 10, 10], 1024
train_loader = NeighborLoader(data, fanout, input_nodes=split["train"], batch_size=batch_size, shuffle=True)
val_loader = NeighborLoader(data, fanout, input_nodes=split["valid"], batch_size=batch_size)
test_loader = NeighborLoader(data, fanout, input_nodes=split["test"], batch_size=batch_size)

model = GraphSAGE(dataset.num_features, 256, num_layers=3, out_channels=dataset.num_classes, dropout=0.5)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)


def train():
    model.train()
    for batch in train_loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size].view(-1))
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def test(loader):
    model.eval()
    right = count = 0
    for batch in loader:
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        right += int((out.argmax(dim=-1) == batch.y[: batch.batch_size].view(-1)).sum())
        count += batch.batch_size
    return right / count


for epoch in range(1, 4):
    loss = train()
    print(f"epoch {epoch}: loss {loss:.3f}, val {test(val_loader):.3f}, test {test(test_loader):.3f}")
