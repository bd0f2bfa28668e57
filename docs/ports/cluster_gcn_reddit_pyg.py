"""Cluster-GCN on Reddit: trained on parts of the graph and the edges between them."""

import torch
import torch.nn.functional as F
from torch_geometric.datasets import Reddit
from torch_geometric.loader import ClusterData, ClusterLoader, NeighborLoader
from torch_geometric.nn import SAGEConv

data = Reddit("data/Reddit")[0]
num_classes = int(data.y.max()) + 1
train_loader = ClusterLoader(ClusterData(data, num_parts=1500), batch_size=20, shuffle=True)
layer_loader = NeighborLoader(data, [-1], batch_size=1024)


class Net(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(in_channels, 128), SAGEConv(128, out_channels)])

    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index).relu()
        x = F.dropout(x, 0.5, self.training)
        return self.convs[1](x, edge_index)

    @torch.no_grad()
    def inference(self, x):
        for number, conv in enumerate(self.convs):
            rows = []
            for batch in layer_loader:
                out = conv(x[batch.n_id], batch.edge_index)[: batch.batch_size]
                rows.append(out.relu() if number == 0 else out)
            x = torch.cat(rows)
        return x


model = Net(data.num_features, num_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)


def train():
    model.train()
    for batch in train_loader:
        optimizer.zero_grad()
        out, mask = model(batch.x, batch.edge_index), batch.train_mask
        loss = F.cross_entropy(out[mask], batch.y[mask])
        loss.backward()
        optimizer.step()
    return loss.item()


def test():
    model.eval()
    right = model.inference(data.x).argmax(dim=-1) == data.y
    return [float(right[rows].float().mean()) for rows in (data.train_mask, data.val_mask, data.test_mask)]


for epoch in range(1, 6):
    loss = train()
    print(f"epoch {epoch}: loss {loss:.3f}")
scores = test()
print(f"train {scores[0]:.3f}, val {scores[1]:.3f}, test {scores[2]:.3f}")
