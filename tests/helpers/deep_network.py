"""A network so deep that a rounding in 16 bits moves its outputs by percents, and its gradients by more."""
import torch
from torch import Tensor, nn


class Deep(nn.Module):
    """Twenty-four layers, in BF16 autocast where they round, and dropout behind them. [B, 32] -> [B, 32]."""

    def __init__(self, rounds: bool, p: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh()) for _ in range(24))
        self.dropout, self.rounds = nn.Dropout(p), rounds

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.rounds and x.dtype == torch.float32):
            for layer in self.layers:
                x = layer(x)
        return self.dropout(x)
