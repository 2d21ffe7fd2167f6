"""The calls that published models make to mamba_ssm, rewritten without the rest of the models.

Each model takes the function that it calls, so that a test can pass the reference instead.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, DSTATE, RANK, WIDTH = 8, 4, 2, 4


class Direction(nn.Module):
    """The parameters of one direction of a layer."""

    def __init__(self):
        super().__init__()
        self.conv1d = nn.Conv1d(DIM, DIM, WIDTH, groups=DIM, padding=WIDTH - 1)
        self.x_proj = nn.Linear(DIM, RANK + 2 * DSTATE, bias=False)
        self.dt_proj = nn.Linear(RANK, DIM)
        self.A_log = nn.Parameter(torch.rand(DIM, DSTATE))
        self.D = nn.Parameter(torch.ones(DIM))


class Vim(nn.Module):
    """Mixes a sequence of patches from both ends, by mamba_inner_fn on xz and on its flip."""

    def __init__(self, mamba_inner):
        super().__init__()
        self.mamba_inner = mamba_inner
        self.in_proj = nn.Linear(DIM, 2 * DIM, bias=False)
        self.out_proj = nn.Linear(DIM, DIM, bias=False)
        self.there, self.back = Direction(), Direction()

    def _one_way(self, direction: Direction, xz: Tensor) -> Tensor:
        return self.mamba_inner(
            xz,
            direction.conv1d.weight,
            direction.conv1d.bias,
            direction.x_proj.weight,
            direction.dt_proj.weight,
            self.out_proj.weight,
            self.out_proj.bias,
            -torch.exp(direction.A_log),
            None,
            None,
            direction.D,
            delta_bias=direction.dt_proj.bias,
            delta_softplus=True,
        )

    def forward(self, image: Tensor) -> Tensor:
        """Mixes an image of (batch, DIM, height, width), which all models here take."""
        xz = self.in_proj(image.flatten(2).transpose(1, 2)).transpose(1, 2)
        there = self._one_way(self.there, xz)
        return there + self._one_way(self.back, xz.flip([-1])).flip([1])


class VideoMamba(Vim):
    """Vim's mixer over a class token and the patches of all frames. The rows of the image stand for
    frames, each of which has an embedding of its time."""

    def __init__(self, mamba_inner):
        super().__init__(mamba_inner)
        self.class_token = nn.Parameter(torch.randn(1, DIM, 1))
        self.time = nn.Parameter(torch.randn(DIM, 3, 1))

    def forward(self, image: Tensor) -> Tensor:
        clip = (image + self.time).flatten(2)
        tokens = torch.cat([self.class_token.expand(len(clip), -1, -1), clip], dim=-1)
        return super().forward(tokens[..., None])[:, 1:]


class VMamba(nn.Module):
    """A cross scan: four walks over the image, passed as four groups of B and C in one call."""

    def __init__(self, selective_scan):
        super().__init__()
        self.selective_scan = selective_scan
        self.x_proj_weight = nn.Parameter(torch.randn(4, RANK + 2 * DSTATE, DIM) * 0.3)
        self.dt_projs_weight = nn.Parameter(torch.randn(4, DIM, RANK) * 0.3)
        self.dt_projs_bias = nn.Parameter(torch.randn(4, DIM))
        self.A_logs = nn.Parameter(torch.rand(4 * DIM, DSTATE))
        self.Ds = nn.Parameter(torch.ones(4 * DIM))

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[2:]
        walks = torch.stack([image.flatten(2), image.transpose(2, 3).flatten(2)], 1)
        xs = torch.cat([walks, walks.flip([-1])], 1)  # (batch, 4, DIM, seqlen)
        projected = torch.einsum("bkdl,kcd->bkcl", xs, self.x_proj_weight)
        dts, Bs, Cs = torch.split(projected, [RANK, DSTATE, DSTATE], dim=2)
        dts = torch.einsum("bkrl,kdr->bkdl", dts, self.dt_projs_weight)
        ys = self.selective_scan(
            xs.flatten(1, 2),
            dts.flatten(1, 2),
            -torch.exp(self.A_logs),
            Bs,
            Cs,
            self.Ds,
            delta_bias=self.dt_projs_bias.flatten(),
            delta_softplus=True,
        )
        ys = ys.unflatten(1, (4, DIM))
        rows, columns = (ys[:, :2] + ys[:, 2:].flip([-1])).unbind(1)
        columns = columns.unflatten(-1, (width, height)).transpose(2, 3).flatten(2)
        return (rows + columns).transpose(1, 2)


class MambaVision(nn.Module):
    """Scans half of the channels and passes the other half by; the convolutions look both ways."""

    def __init__(self, selective_scan):
        super().__init__()
        self.selective_scan = selective_scan
        self.in_proj = nn.Linear(DIM, 2 * DIM)
        self.conv1d_x = nn.Conv1d(DIM, DIM, 3, groups=DIM, bias=False)
        self.conv1d_z = nn.Conv1d(DIM, DIM, 3, groups=DIM, bias=False)
        self.x_proj = nn.Linear(DIM, RANK + 2 * DSTATE, bias=False)
        self.dt_proj = nn.Linear(RANK, DIM)
        self.A_log = nn.Parameter(torch.rand(DIM, DSTATE))
        self.D = nn.Parameter(torch.ones(DIM))
        self.out_proj = nn.Linear(2 * DIM, DIM)

    def forward(self, image: Tensor) -> Tensor:
        xz = self.in_proj(image.flatten(2).transpose(1, 2)).transpose(1, 2)
        x, z = xz.chunk(2, dim=1)
        x, z = (
            F.silu(F.conv1d(part, conv.weight, padding="same", groups=DIM))
            for part, conv in [(x, self.conv1d_x), (z, self.conv1d_z)]
        )
        batch, _, seqlen = x.shape
        rows = self.x_proj(x.transpose(1, 2).reshape(batch * seqlen, DIM))
        dt, B, C = torch.split(rows, [RANK, DSTATE, DSTATE], dim=-1)
        dt = F.linear(dt, self.dt_proj.weight).view(batch, seqlen, DIM).transpose(1, 2)
        B, C = (part.view(batch, seqlen, DSTATE).transpose(1, 2).contiguous() for part in (B, C))
        y = self.selective_scan(
            x,
            dt,
            -torch.exp(self.A_log),
            B,
            C,
            self.D,
            z=None,
            delta_bias=self.dt_proj.bias,
            delta_softplus=True,
            return_last_state=None,
        )
        return self.out_proj(torch.cat([y, z], dim=1).transpose(1, 2))


class Caduceus(nn.Module):
    """Two layers, one for each direction, which share their input and output projections."""

    def __init__(self, mamba):
        super().__init__()
        self.there, self.back = (mamba(DIM, d_state=DSTATE, layer_idx=i) for i in range(2))
        for name in ("in_proj", "out_proj"):
            getattr(self.back, name).weight = getattr(self.there, name).weight

    def forward(self, image: Tensor) -> Tensor:
        x = image.flatten(2).transpose(1, 2)
        there = self.there(x, inference_params=None)
        return there + self.back(x.flip(1), inference_params=None).flip(1)
