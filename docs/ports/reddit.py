"""GraphSAGE on Reddit: trained on sampled neighborhoods, scored layer by layer."""

import torch
import torch.nn.functional as F
from torch_geometric.nn import SAGEConv

import ooc

data = ooc.open("reddit.ooc", memory="2GB")
train_loader = ooc.NeighborLoader(data, [25, 10], input_nodes="train", batch_size=1024, shuffle=True)


class SAGE(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(in_channels, hidden_channels), SAGEConv(hidden_channels, out_channels)])

    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index).relu()
        x = F.dropout(x, 0.5, self.training)
        return self.convs[1](x, edge_index)


model = SAGE(data.num_features, 256, data.num_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def train():
    model.train()
    for batch in train_loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
    return loss.item()


def test():
    model.eval()
    right = ooc.infer(model, data)[:].argmax(axis=-1) == data.labels
    return [float(right[data.split(name)].mean()) for name in ("train", "val", "test")]


for epoch in range(1, 4):
    loss = train()
    scores = test()
    print(f"epoch {epoch}: loss {loss:.3f}, train {scores[0]:.3f}, val {scores[1]:.3f}, test {scores[2]:.3f}")
