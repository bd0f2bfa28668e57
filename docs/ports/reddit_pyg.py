"""GraphSAGE on Reddit: trained on sampled neighborhoods, scored layer by layer."""

import torch
import torch.nn.functional as F
from torch_geometric.datasets import Reddit
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv

data = Reddit("data/Reddit")[0]
num_classes = int(data.y.max()) + 1
train_loader = NeighborLoader(data, [25, 10], input_nodes=data.train_mask, batch_size=1024, shuffle=True)
layer_loader = NeighborLoader(data, [-1], batch_size=1024)


class SAGE(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(in_channels, hidden_channels), SAGEConv(hidden_channels, out_channels)])

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


model = SAGE(data.num_features, 256, num_classes)
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
    right = model.inference(data.x).argmax(dim=-1) == data.y
    return [float(right[rows].float().mean()) for rows in (data.train_mask, data.val_mask, data.test_mask)]


for epoch in range(1, 4):
    loss = train()
    scores = test()
    print(f"epoch {epoch}: loss {loss:.3f}, train {scores[0]:.3f}, val {scores[1]:.3f}, test {scores[2]:.3f}")
