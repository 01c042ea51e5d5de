"""A convolutional classifier as people write one from papers: it is right, and slow in every way that is planted here.

    python -m benchmarks assistant benchmarks/examples/cnn.py:build
"""
import logging
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

log = logging.getLogger(__name__)


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class LayerNorm2d(nn.Module):
    """Over the channels, [B, C, H, W]."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Residual(nn.Module):
    """x + two convolutions, each with its norm."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = LayerNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = swish(self.bn1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        if torch.isnan(h).any():
            raise ValueError("the activations diverge")
        return x + new_gelu(h)


class PixelAttention(nn.Module):
    """Self-attention over all pixels, [B, C, H, W]."""

    def __init__(self, channels: int):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q = self.q(x).reshape(b, c, h * w).permute(0, 2, 1)
        k = self.k(x).reshape(b, c, h * w)
        v = self.v(x).reshape(b, c, h * w)
        weights = torch.bmm(q, k) * c ** -0.5                                  # [B, H W, H W]
        weights = F.softmax(weights, dim=2)
        y = torch.bmm(v, weights.permute(0, 2, 1))
        return x + self.out(y.reshape(b, c, h, w))


class Head(nn.Module):
    """The mean of all pixels -> logits, [B, C, H, W] -> [B, classes]."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits = []
        for image in x:
            logits.append(self.fc(image.mean((1, 2))))
        return torch.stack(logits)


class Classifier(nn.Module):
    """Images [B, 3, H, W] -> logits [B, classes]."""

    def __init__(self, channels: int, blocks: int, classes: int):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 4, stride=4)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(blocks))
        self.attention = PixelAttention(channels)
        self.head = Head(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        log.debug("%d images", len(images))
        for block in self.blocks:
            x = block(x)
        return self.head(self.attention(x))


def of_size(channels: int, blocks: int, classes: int, batch: int, size: int, device: str = "cpu"):
    """(model, inputs, loss) of that size, the same every time."""
    torch.manual_seed(0)
    model = Classifier(channels, blocks, classes).to(device)
    images = torch.randn(batch, 3, size, size).to(device)
    targets = torch.randint(classes, (batch,)).to(device)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)
    return model, (images,), loss


def build():
    """Of a size for a GPU; on a CPU one that two cores run in less than a second."""
    if torch.cuda.is_available():
        return of_size(channels=256, blocks=12, classes=1000, batch=64, size=128, device="cuda")
    return of_size(channels=64, blocks=4, classes=100, batch=8, size=96)
