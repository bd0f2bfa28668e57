"""Cluster-GCN on Reddit: trained on parts of the graph and the edges between them."""

import torch
import torch.nn.functional as F
from torch_geometric.nn import SAGEConv

import ooc

data = ooc.open("reddit.ooc", memory="2GB")
train_loader = ooc.ClusterLoader(data, batch_size=20, shuffle=True, input_nodes="train")


class Net(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(in_channels, 128), SAGEConv(128, out_channels)])

    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index).relu()
        x = F.dropout(x, 0.5, self.training)
        return self.convs[1](x, edge_index)


model = Net(data.num_features, data.num_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)


def train():
    model.train()
    for batch in train_loader:
        optimizer.zero_grad()
        out, mask = model(batch.x, batch.edge_index), batch.input_mask
        loss = F.cross_entropy(out[mask], batch.y[mask])
        loss.backward()
        optimizer.step()
    return loss.item()


def test():
    model.eval()
    right = ooc.infer(model, data)[:].argmax(axis=-1) == data.labels
    return [float(right[data.split(name)].mean()) for name in ("train", "val", "test")]


for epoch in range(1, 6):
    loss = train()
    print(f"epoch {epoch}: loss {loss:.3f}")
scores = test()
print(f"train {scores[0]:.3f}, val {scores[1]:.3f}, test {scores[2]:.3f}")
