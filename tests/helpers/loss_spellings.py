"""Cross-entropies by hand, as people write them in a forward: each model takes x [B, S, E] and targets [B, S]."""
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, CLASSES = 16, 37


class Model(nn.Module):
    """Logits of each token, and a loss by hand; a spelling gives `loss`."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, targets):
        return self.loss(self.head(x), targets)


class Gathered(Model):
    def loss(self, logits, targets):
        logits = logits.view(-1, CLASSES)
        shifted = logits - logits.max(dim=-1, keepdim=True).values
        log_probabilities = shifted - shifted.exp().sum(-1, keepdim=True).log()
        return -log_probabilities.gather(-1, targets.view(-1, 1)).mean()


class GatheredDetached(Model):
    def loss(self, logits, targets):
        shifted = logits - logits.amax(-1, keepdim=True).detach()
        log_probabilities = shifted - torch.log(torch.exp(shifted).sum(dim=-1, keepdim=True))
        picked = log_probabilities.gather(2, targets.unsqueeze(-1))
        return -picked.squeeze(-1).mean()


class Indexed(Model):
    def loss(self, logits, targets):
        logits, targets = logits.view(-1, CLASSES), targets.view(-1)
        log_probabilities = torch.log(torch.softmax(logits, dim=-1))
        return -log_probabilities[torch.arange(targets.shape[0]), targets].mean()


class IndexedProbabilities(Model):
    def loss(self, logits, targets):
        logits, targets = logits.view(-1, CLASSES), targets.view(-1)
        probabilities = torch.softmax(logits, dim=-1)
        return -torch.log(probabilities[torch.arange(len(targets)), targets]).sum()


class OneHot(Model):
    def loss(self, logits, targets):
        one_hot = F.one_hot(targets, CLASSES).float()
        return -(one_hot * F.log_softmax(logits, dim=-1)).sum(-1).mean()


class OneHotScattered(Model):
    def loss(self, logits, targets):
        log_probabilities = F.log_softmax(logits, dim=-1)
        one_hot = torch.zeros_like(log_probabilities).scatter_(-1, targets.unsqueeze(-1), 1)
        return -(log_probabilities * one_hot).sum(dim=-1).mean()


class LogSumExp(Model):
    def loss(self, logits, targets):
        picked = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return (torch.logsumexp(logits, dim=-1) - picked).mean()


class ByNLL(Model):
    def loss(self, logits, targets):
        log_probabilities = torch.log(F.softmax(logits, dim=-1))
        return F.nll_loss(log_probabilities.view(-1, CLASSES), targets.view(-1))


class ByNLLFlat(Model):
    def loss(self, logits, targets):
        log_probabilities = torch.log(F.softmax(logits.view(-1, CLASSES), dim=-1))
        return F.nll_loss(log_probabilities, targets.view(-1))


class PerToken(Model):
    """The loss of each token, of which some do not count."""

    def loss(self, logits, targets):
        log_probabilities = logits - logits.logsumexp(-1, keepdim=True)
        each = -log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        counts = (targets != 0).float()
        return (each * counts).sum() / counts.sum()


class WithTemperature(Model):
    def loss(self, logits, targets):
        logits = logits / 0.7
        probabilities = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
        return -probabilities.gather(-1, targets.unsqueeze(-1)).log().mean()


class InFloat32(Model):
    def loss(self, logits, targets):
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
        return -probabilities.log().gather(-1, targets.unsqueeze(-1)).mean()


RIGHT = (Gathered, GatheredDetached, Indexed, IndexedProbabilities, OneHot, OneHotScattered, LogSumExp, ByNLL,
         ByNLLFlat, PerToken, WithTemperature, InFloat32)


class KeptFromZero(Model):
    def loss(self, logits, targets):
        probabilities = torch.softmax(logits, dim=-1)
        return -torch.log(probabilities.gather(-1, targets.unsqueeze(-1)) + 1e-8).mean()


class Smoothed(Model):
    def loss(self, logits, targets):
        log_probabilities = torch.log(torch.softmax(logits, dim=-1))
        picked = log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return (-0.9 * picked - 0.1 * log_probabilities.mean(-1)).mean()


NEAR = {KeptFromZero: "kept from zero", Smoothed: "label_smoothing"}


class Library(Model):
    def loss(self, logits, targets):
        return F.cross_entropy(logits.view(-1, CLASSES), targets.view(-1))


class AsFast(Model):
    """The library's own two kernels, and an index."""

    def loss(self, logits, targets):
        return -F.log_softmax(logits, dim=-1).gather(-1, targets.unsqueeze(-1)).mean()


class NextClass(Model):
    """One row of each pair alone: no row has its own target."""

    def loss(self, logits, targets):
        logits, targets = logits.view(-1, CLASSES), targets.view(-1)
        log_probabilities = torch.log(torch.softmax(logits, dim=-1))
        return -log_probabilities[torch.arange(targets.shape[0]).flip(0), targets].mean()


class OverTokens(Model):
    """A softmax over the tokens."""

    def loss(self, logits, targets):
        log_probabilities = torch.log(torch.softmax(logits, dim=1))
        return -log_probabilities.gather(-1, targets.unsqueeze(-1)).mean()


class WithoutGradient(Model):
    """The sum is detached: equal values, and another gradient."""

    def loss(self, logits, targets):
        log_probabilities = logits - logits.logsumexp(-1, keepdim=True).detach()
        return -log_probabilities.gather(-1, targets.unsqueeze(-1)).mean()


class Weighted(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.5, 1.5, CLASSES))

    def loss(self, logits, targets):
        log_probabilities = torch.log(torch.softmax(logits.view(-1, CLASSES), dim=-1))
        return F.nll_loss(log_probabilities, targets.view(-1), self.weight)


class Entropy(Model):
    """Of the softmax itself: no targets."""

    def loss(self, logits, targets):
        probabilities = torch.softmax(logits, dim=-1)
        return -(probabilities * torch.log(probabilities)).sum(-1).mean()


OTHERS = (Library, AsFast, NextClass, OverTokens, WithoutGradient, Weighted, Entropy)
