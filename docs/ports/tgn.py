"""TGN on a stream of interactions: node memory, attention over the latest neighbors, link prediction."""

import torch
from torch_geometric.nn import TGNMemory, TransformerConv
from torch_geometric.nn.models import tgn
from torchmetrics.functional.classification import binary_average_precision

import ooc

data = ooc.open("wikipedia.ooc", memory="2GB")
options = {"num_neighbors": [10], "shared": True, "negatives": ooc.RandomNegatives(0, data.num_nodes)}
train_loader, val_loader = (ooc.EventLoader(data, 200, events=name, **options) for name in ("train", "val"))
num_nodes, msg_dim, dim = data.num_nodes, *data.events.width("msg"), 100


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
    z, last_update = (rows[batch.entry] for rows in memory(batch.n_id))
    z = gnn(z, last_update, batch.edge_index, batch.entry_t[batch.edge_index[0]], batch.edge_msg)
    src, dst, negative = z[batch.query].chunk(3)
    return predictor(src, dst), predictor(src, negative)


def after(batch):
    memory.update_state(batch.src, batch.dst, batch.t, batch.msg)


def train():
    modules.train()
    memory.reset_state()
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
