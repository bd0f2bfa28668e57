"""A reversible GNN of seven layers on an OGB data set: trained on random parts of the graph."""

import torch
import torch.nn.functional as F
from torch_geometric.nn import GroupAddRev, SAGEConv

import ooc

dataset = data = ooc.open("products.ooc", memory="4GB")
train_loader = ooc.ClusterLoader(data, num_parts=100, batch_size=10, shuffle=True, input_nodes="train")
test_loader = ooc.ClusterLoader(data, num_parts=100, batch_size=100, input_nodes="test")


class Block(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm, self.conv = torch.nn.LayerNorm(channels), SAGEConv(channels, channels)

    def forward(self, x, edge_index):
        return self.conv(self.norm(x).relu(), edge_index)


class RevGNN(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, num_layers, num_groups=2):
        super().__init__()
        self.first, self.last = torch.nn.Linear(in_channels, hidden_channels), torch.nn.Linear(hidden_channels, out_channels)
        self.norm = torch.nn.LayerNorm(hidden_channels)
        blocks = [Block(hidden_channels // num_groups) for _ in range(num_layers)]
        self.convs = torch.nn.ModuleList(GroupAddRev(block, num_groups=num_groups) for block in blocks)

    def forward(self, x, edge_index):
        x = self.first(x)
        for conv in self.convs:
            x = conv(x, edge_index)
        return self.last(F.dropout(self.norm(x).relu(), 0.5, self.training))


model = RevGNN(dataset.num_features, 160, dataset.num_classes, num_layers=7)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)


def train():
    model.train()
    for batch in train_loader:
        optimizer.zero_grad()
        mask = batch.input_mask
        loss = F.cross_entropy(model(batch.x, batch.edge_index)[mask], batch.y[mask].view(-1))
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    model.eval()
    right = count = 0
    for batch in test_loader:
        mask = batch.input_mask
        right += int((model(batch.x, batch.edge_index).argmax(dim=-1) == batch.y.view(-1))[mask].sum())
        count += int(mask.sum())
    return right / count


for epoch in range(1, 4):
    print(f"epoch {epoch}: loss {train():.3f}")
print(f"test {test():.3f}")
