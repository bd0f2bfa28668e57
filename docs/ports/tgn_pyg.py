"""TGN on a stream of interactions: node memory, attention over the latest neighbors, link prediction."""

import torch
from torch_geometric.datasets import JODIEDataset
from torch_geometric.loader import TemporalDataLoader
from torch_geometric.nn import TGNMemory, TransformerConv
from torch_geometric.nn.models import tgn
from torchmetrics.functional.classification import binary_average_precision

data = JODIEDataset("data", name="wikipedia")[0]
train_data, val_data, _ = data.train_val_test_split(val_ratio=0.15, test_ratio=0.15)
train_loader = TemporalDataLoader(train_data, batch_size=200, neg_sampling_ratio=1.0)
val_loader = TemporalDataLoader(val_data, batch_size=200, neg_sampling_ratio=1.0)
neighbors = tgn.LastNeighborLoader(data.num_nodes, size=10)
assoc = torch.empty(data.num_nodes, dtype=torch.long)
num_nodes, msg_dim, dim = data.num_nodes, data.msg.size(-1), 100


class Attention(torch.nn.Module):
    def __init__(self, time_enc):
        super().__init__()
        self.time_enc = time_enc
        self.conv = TransformerConv(dim, dim // 2, heads=2, dropout=0.1, edge_dim=msg_dim + time_enc.out_channels)

    def forward(self, x, last_update, edge_index, t, msg):
        elapsed = self.time_enc((last_update[edge_index[0]] - t).to(x.dtype))
        return self.conv(x, edge_index, torch.cat([elapsed, msg], dim=-1))


class LinkPredictor(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.src, self.dst, self.out = torch.nn.Linear(dim, dim), torch.nn.Linear(dim, dim), torch.nn.Linear(dim, 1)

    def forward(self, src, dst):
        return self.out((self.src(src) + self.dst(dst)).relu()).view(-1)


memory = TGNMemory(num_nodes, msg_dim, dim, dim, tgn.IdentityMessage(msg_dim, dim, dim), tgn.LastAggregator())
gnn, predictor = Attention(memory.time_enc), LinkPredictor()
modules = torch.nn.ModuleList([memory, gnn, predictor])
optimizer = torch.optim.Adam(modules.parameters(), lr=0.001)


def scores_of(batch):
    n_id, edge_index, e_id = neighbors(batch.n_id)
    assoc[n_id] = torch.arange(n_id.size(0))
    z, last_update = memory(n_id)
    z = gnn(z, last_update, edge_index, data.t[e_id], data.msg[e_id])
    src, dst, negative = z[assoc[batch.src]], z[assoc[batch.dst]], z[assoc[batch.neg_dst]]
    return predictor(src, dst), predictor(src, negative)


def after(batch):
    memory.update_state(batch.src, batch.dst, batch.t, batch.msg)
    neighbors.insert(batch.src, batch.dst)


def train():
    modules.train()
    memory.reset_state()
    neighbors.reset_state()
    for batch in train_loader:
        optimizer.zero_grad()
        positive, negative = scores_of(batch)
        loss = torch.nn.functional.softplus(-positive).mean() + torch.nn.functional.softplus(negative).mean()
        after(batch)
        loss.backward()
        optimizer.step()
        memory.detach()
    return loss.item()


@torch.no_grad()
def test(loader):
    modules.eval()
    precisions = []
    for batch in loader:
        positive, negative = scores_of(batch)
        target = torch.cat([torch.ones_like(positive), torch.zeros_like(negative)]).long()
        precisions.append(binary_average_precision(torch.cat([positive, negative]), target))
        after(batch)
    return float(torch.stack(precisions).mean())


for epoch in range(1, 3):
    print(f"epoch {epoch}: loss {train():.3f}, val AP {test(val_loader):.3f}")
