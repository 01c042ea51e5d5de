"""Attention by hand, spelt in many ways. Each is a class, so that its lines are those of a person's module."""
import math

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH = 32, 4, 16


class Attention(nn.Module):
    """[B, S, E] -> [B, S, E]; `attend` takes and gives [B, H, S, D]."""
    key_heads = HEADS

    def __init__(self):
        super().__init__()
        D = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, self.key_heads * D)
        self.v = nn.Linear(WIDTH, self.key_heads * D)
        self.drop = nn.Dropout(0.1)
        self.scale = D ** -0.5
        self.register_buffer("tril", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))
        self.register_buffer("minus", torch.full((LENGTH, LENGTH), -math.inf).triu(1))

    def forward(self, x):
        B, S, E = x.shape
        q = self.q(x).view(B, S, HEADS, -1).transpose(1, 2)
        k = self.k(x).view(B, S, self.key_heads, -1).transpose(1, 2)
        v = self.v(x).view(B, S, self.key_heads, -1).transpose(1, 2)
        return self.attend(q, k, v).transpose(1, 2).reshape(B, S, E)


class StepZero(Attention):
    def attend(self, q, k, v):
        scores = q @ k.mT / math.sqrt(q.size(-1))
        future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        return weights @ v


class NanoGPT(Attention):
    def attend(self, q, k, v):
        S = q.size(-2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.tril[:, :, :S, :S] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.drop(att)
        y = att @ v
        return y


class AddedMask(Attention):
    def attend(self, q, k, v):
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scale
        scores = scores + self.minus
        return torch.matmul(torch.softmax(scores, -1), v)


class MaskedBeforeItIsScaled(Attention):
    def attend(self, q, k, v):
        scores = q @ k.mT
        scores = scores.masked_fill(self.tril == 0, -1e9)
        scores = scores / math.sqrt(q.size(-1))
        return F.softmax(scores, dim=3) @ v


class PreScaled(Attention):
    def attend(self, q, k, v):
        q = q * self.scale
        scores = q @ k.transpose(-1, -2)
        scores = torch.where(self.tril > 0, scores, -math.inf)
        return scores.softmax(-1) @ v


class WhereBlocked(Attention):
    def attend(self, q, k, v):
        scores = (q @ k.mT).div(math.sqrt(q.size(-1)))
        scores = torch.where(self.tril == 0, torch.finfo(scores.dtype).min, scores)
        return F.dropout(scores.softmax(-1), 0.2, self.training) @ v


class FilledLikeItsScores(Attention):
    def attend(self, q, k, v):
        scores = q @ k.mT * self.scale
        scores = torch.where(self.tril == 0, torch.full_like(scores, -1e9), scores)
        return scores.softmax(-1) @ v


class FilledWithANamedNumber(Attention):
    """As GPT-2 and its heirs had it."""

    def attend(self, q, k, v):
        S = q.size(-2)
        scores = q @ k.mT * self.scale
        mask_value = torch.finfo(scores.dtype).min
        mask_value = torch.tensor(mask_value, dtype=scores.dtype, device=scores.device)
        scores = torch.where(self.tril[:, :, :S, :S] > 0, scores, mask_value)
        return scores.softmax(-1) @ v


class FilledWithOnesTimesANumber(Attention):
    def attend(self, q, k, v):
        scores = q @ k.mT * self.scale
        least = -2**15 * torch.ones_like(scores) - 1.0
        return torch.where(self.tril > 0, scores, least).softmax(-1) @ v


class FilledWithZeros(Attention):
    def attend(self, q, k, v):
        scores = q @ k.mT * self.scale
        return torch.where(self.tril == 0, torch.zeros_like(scores), scores).softmax(-1) @ v


class FilledWithLessThanAll(Attention):
    filled = -320.0

    def attend(self, q, k, v):
        scores = q @ k.mT
        scores = scores.masked_fill(self.tril == 0, self.filled) * 0.125
        return scores.softmax(-1) @ v


class FilledWithMoreThanThat(FilledWithLessThanAll):
    filled = -319.0


class FilledWithATensor(Attention):
    def attend(self, q, k, v):
        scores = q @ k.mT * self.scale
        return torch.where(self.tril == 0, -1e9 * scores.abs(), scores).softmax(-1) @ v


class FilledWithANewTensor(Attention):
    def attend(self, q, k, v):
        scores = q @ k.mT * self.scale
        scores = torch.where(self.tril == 0, scores.new_full((1, 1), fill_value=-math.inf).float(), scores)
        return scores.softmax(-1) @ v


class Unmasked(Attention):
    def attend(self, q, k, v):
        return (q @ k.mT * self.scale).softmax(-1) @ v


class OtherScale(Attention):
    def attend(self, q, k, v):
        scores = q @ k.mT / 2.0
        return F.softmax(scores, -1) @ v


class LocalWindow(Attention):
    """No mask that is_causal could say."""

    def attend(self, q, k, v):
        scores = q @ k.mT * self.scale
        near = self.tril.bool() & ~torch.ones_like(self.tril).tril(-4).bool()
        scores = scores.masked_fill(~near, -math.inf)
        return scores.softmax(-1) @ v


class Slopes(Attention):
    """Added to the scores, and no mask."""

    def attend(self, q, k, v):
        scores = q @ k.mT * self.scale
        places = torch.arange(q.size(-2), device=q.device, dtype=q.dtype)
        scores = scores + 0.1 * (places[None, :] - places[:, None])
        scores = scores.masked_fill(self.tril == 0, -math.inf)
        return scores.softmax(-1) @ v


class InFloat32(Attention):
    def attend(self, q, k, v):
        scores = torch.matmul(q, k.transpose(-2, -1)) * self.scale
        scores = scores + self.minus
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, v)


class ScoresInFloat32(Attention):
    """As GPT-J and GPT-Neo have it."""

    def attend(self, q, k, v):
        q = q.to(torch.float32)
        k = k.to(torch.float32)
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        scores = scores + self.minus
        weights = F.softmax(scores, dim=-1)
        weights = weights.to(v.dtype)
        return torch.matmul(weights, v)


class ScoresInFloat32AtOnce(Attention):
    def attend(self, q, k, v):
        weights = (q.float() @ k.float().mT * self.scale).softmax(-1).type_as(v)
        return weights @ v


class ValuesInFloat32(Attention):
    def attend(self, q, k, v):
        weights = torch.softmax(q @ k.mT * self.scale, -1, dtype=torch.float32)
        return (weights @ v.float()).type_as(q)


class GroupedHeads(Attention):
    key_heads = 2

    def attend(self, q, k, v):
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        scores = q @ k.mT * self.scale
        scores = scores.masked_fill(self.tril == 0, -math.inf)
        return scores.softmax(-1) @ v


class Einsum(Attention):
    def attend(self, q, k, v):
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        scores = scores.masked_fill(self.tril == 0, -math.inf)
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


class EinsumAcross(Attention):
    """On [B, S, H, D], as JAX's people write it."""

    def attend(self, q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.scale
        scores = scores.masked_fill(self.tril == 0, -math.inf)
        y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return y.transpose(1, 2)


class Batched(Attention):
    """By bmm on [B H, S, D]."""

    def attend(self, q, k, v):
        B, H, S, D = q.shape
        q, k, v = (t.reshape(B * H, S, D) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) * self.scale
        scores = scores.masked_fill(self.tril[0] == 0, -math.inf)
        return torch.bmm(scores.softmax(-1), v).view(B, H, S, D)


class BatchedWithABias(Attention):
    """Added to scores of three dimensions."""

    def __init__(self):
        super().__init__()
        numbers = torch.Generator().manual_seed(2)
        self.register_buffer("bias", torch.randn(1, LENGTH, LENGTH, generator=numbers))

    def attend(self, q, k, v):
        B, H, S, D = q.shape
        q, k, v = (t.reshape(B * H, S, D) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) * self.scale
        scores = scores + self.bias
        return torch.bmm(scores.softmax(-1), v).view(B, H, S, D)


class BatchedWithARow(BatchedWithABias):
    def attend(self, q, k, v):
        B, H, S, D = q.shape
        q, k, v = (t.reshape(B * H, S, D) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) * self.scale
        scores = scores + self.bias[0, 0]
        return torch.bmm(scores.softmax(-1), v).view(B, H, S, D)


class SoftmaxByHand(Attention):
    def attend(self, q, k, v):
        scores = (q @ k.mT) * self.scale
        scores = scores.masked_fill(self.tril == 0, -math.inf)
        scores = scores - scores.amax(-1, keepdim=True)
        exponentials = scores.exp()
        return self.drop(exponentials / exponentials.sum(-1, keepdim=True)) @ v


class ExponentialsOverTheirSum(Attention):
    """Without its largest, which only keeps it from overflowing."""

    def attend(self, q, k, v):
        scores = torch.exp((q @ k.mT) * self.scale)
        return scores.div(torch.sum(scores, dim=-1, keepdim=True)) @ v


class NamedSum(Attention):
    """Its largest and its sum have names of their own."""

    def attend(self, q, k, v):
        scores = (q @ k.mT) * self.scale
        scores = scores.masked_fill(self.tril == 0, -math.inf)
        largest = scores.amax(dim=-1, keepdim=True).detach()
        weights = torch.exp(scores - largest)
        total = weights.sum(dim=-1, keepdim=True)
        weights = self.drop(weights / total)
        return weights @ v


class NamedPlaces(Attention):
    def attend(self, q, k, v):
        scores = (q @ k.mT) * self.scale
        largest, _ = scores.max(-1, keepdim=True)
        numerator = (scores - largest).exp()
        denominator = torch.sum(numerator, -1, keepdim=True)
        return torch.div(numerator, denominator) @ v


class NamedValues(Attention):
    def attend(self, q, k, v):
        scores = (q @ k.mT) * self.scale
        largest = torch.max(scores, dim=-1, keepdim=True).values
        scores = torch.sub(scores, largest).exp()
        return self.drop(scores / scores.sum(-1, keepdim=True)) @ v


class LessItsLogarithm(Attention):
    def attend(self, q, k, v):
        scores = (q @ k.mT) * self.scale
        scores = scores.masked_fill(self.tril == 0, -math.inf)
        logarithm = torch.logsumexp(scores, dim=-1, keepdim=True)
        return self.drop(torch.exp(scores - logarithm)) @ v


class OfALogSoftmax(Attention):
    def attend(self, q, k, v):
        weights = F.log_softmax((q @ k.mT) * self.scale, dim=-1).exp()
        return self.drop(weights) @ v


class DividedLate(Attention):
    """Fewer divisions: the output's, not the weights'."""

    def attend(self, q, k, v):
        scores = (q @ k.mT) * self.scale
        scores = scores.masked_fill(self.tril == 0, -math.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights @ v / weights.sum(-1, keepdim=True)


class DividedLateByName(Attention):
    def attend(self, q, k, v):
        weights = torch.exp((q @ k.mT) * self.scale)
        total = weights.sum(dim=-1, keepdim=True)
        output = torch.matmul(weights, v)
        return output.div(total)


class NoSoftmax(Attention):
    """Exponentials over something else than the sum of their row."""

    def attend(self, q, k, v):
        scores = torch.exp((q @ k.mT) * self.scale)
        return (scores / self.divisor(scores)) @ v


class OneMoreInItsSum(NoSoftmax):
    def divisor(self, scores):
        return 1 + scores.sum(-1, keepdim=True)


class SumsOfColumns(NoSoftmax):
    def divisor(self, scores):
        return scores.sum(-2, keepdim=True)


class SumsOfOthers(NoSoftmax):
    def divisor(self, scores):
        return (2 * scores).sum(-1, keepdim=True)


class SumOfAll(NoSoftmax):
    def divisor(self, scores):
        return scores.sum((-2, -1), keepdim=True)


class DividedLateByMore(Attention):
    def attend(self, q, k, v):
        weights = torch.exp((q @ k.mT) * self.scale)
        return weights @ v / (weights.sum(-1, keepdim=True) + 1)


class DividedLateByAll(Attention):
    def attend(self, q, k, v):
        weights = torch.exp((q @ k.mT) * self.scale)
        return weights @ v / weights.sum((-2, -1), keepdim=True)


class LessTheLogarithmOfColumns(Attention):
    def attend(self, q, k, v):
        scores = (q @ k.mT) * self.scale
        return torch.exp(scores - scores.logsumexp(-2, keepdim=True)) @ v


class LessAnothersLogarithm(Attention):
    def attend(self, q, k, v):
        scores = (q @ k.mT) * self.scale
        return torch.exp(scores - (2 * scores).logsumexp(-1, keepdim=True)) @ v


class OfALogSoftmaxOfColumns(Attention):
    def attend(self, q, k, v):
        return F.log_softmax((q @ k.mT) * self.scale, dim=-2).exp() @ v


class InPlace(Attention):
    """The scores change under their name: it must be right, or left alone."""

    def attend(self, q, k, v):
        scores = q @ k.mT
        scores *= self.scale
        scores = scores.masked_fill(self.tril == 0, -math.inf)
        return scores.softmax(-1) @ v


class ValuesFirst(Attention):
    def attend(self, q, k, v):
        weights = (q @ k.mT * self.scale + self.minus).softmax(-1)
        weights = weights.transpose(2, 3)
        return (v.transpose(2, 3) @ weights).mT


class Pixels(Attention):
    """On [B H, D, S], as the attention of latent diffusion has its pixels."""

    def attend(self, q, k, v):
        B, H, S, D = q.shape
        q, k, v = (t.transpose(2, 3).reshape(B * H, D, S) for t in (q, k, v))
        q = q.permute(0, 2, 1)
        w_ = torch.bmm(q, k)
        w_ = w_ * (int(D) ** (-0.5))
        w_ = torch.nn.functional.softmax(w_, dim=2)
        w_ = w_.permute(0, 2, 1)
        h_ = torch.bmm(v, w_)
        return h_.view(B, H, D, S).mT


class EinsumValuesFirst(Attention):
    def attend(self, q, k, v):
        weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * self.scale, dim=-1)
        return torch.einsum("bhjd,bhij->bhid", v, weights)


class LessItsLargest(Attention):
    """As lucidrains' code has it: no softmax takes notice."""

    def attend(self, q, k, v):
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        return torch.einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)


class LessItsMaximum(Attention):
    def attend(self, q, k, v):
        scores = q @ k.mT * self.scale + self.minus
        scores = scores - torch.max(scores, -1, keepdim=True)[0]
        return F.softmax(scores, -1) @ v


class Alibi(Attention):
    """Its bias has three dimensions, one slope a head."""

    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1).view(HEADS, 1, 1))

    def attend(self, q, k, v):
        places = torch.arange(q.size(-2), device=q.device)
        bias = self.slopes * (places[None, :] - places[:, None])
        scores = q @ k.mT * self.scale + bias
        return scores.softmax(-1) @ v


class Cosine(Attention):
    """Swin Transformer V2's: a temperature is learned for each head."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.randn(HEADS, 1, 1))

    def attend(self, q, k, v):
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        logit_scale = torch.clamp(self.logit_scale, max=math.log(100.0)).exp()
        attn = attn * logit_scale
        attn = attn + self.minus
        return attn.softmax(dim=-1) @ v


class DividedByATemperature(Attention):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.5))

    def attend(self, q, k, v):
        return F.softmax(q @ k.mT / self.temperature, dim=-1) @ v


class ShiftedByANumber(Attention):
    def attend(self, q, k, v):
        scores = q @ k.mT * self.scale
        scores = scores + self.minus - 2.5
        return F.softmax(scores, dim=-1) @ v


class KeptFinite(Attention):
    """XGLM's, and that of others which came from BART."""

    def attend(self, q, k, v):
        scores = torch.matmul(q, k.mT) * self.scale + self.minus
        scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))
        return torch.matmul(torch.softmax(scores, dim=-1), v)


class ClampedFromBelow(Attention):
    def attend(self, q, k, v):
        scores = (q @ k.mT * self.scale + self.minus).clamp(min=-1e30)
        return scores.softmax(-1) @ v


class WithItsWeights(Attention):
    """As BERT's and most that came from it: the weights are returned, and nobody looks at them."""

    def forward(self, x):
        B, S, E = x.shape
        q, k, v = (layer(x).view(B, S, HEADS, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        context, _ = self.attend(q, k, v)
        return context.transpose(1, 2).reshape(B, S, E)

    def attend(self, q, k, v):
        scores = q @ k.mT * self.scale + self.minus
        weights = F.softmax(scores, dim=-1)
        weights = self.drop(weights)
        context = weights @ v
        return context, weights


class WithItsWeightsAtOnce(WithItsWeights):
    def attend(self, q, k, v):
        weights = (q @ k.mT * self.scale).softmax(-1)
        return weights @ v, weights


class InBlocks(Attention):
    """Five dimensions, of which the fused kernels take four."""

    def attend(self, q, k, v):
        q, k, v = (t.unflatten(2, (4, 4)) for t in (q, k, v))
        weights = (q @ k.mT * self.scale).softmax(-1)
        return (weights @ v).flatten(2, 3)


class InCausalBlocks(Attention):
    def attend(self, q, k, v):
        q, k, v = (t.unflatten(2, (4, 4)) for t in (q, k, v))
        scores = q @ k.mT * self.scale + self.minus[:4, :4]
        return (scores.softmax(-1) @ v).flatten(2, 3)


class InBlocksWithABias(Attention):
    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.randn(4, 4, 4))             # of each block

    def attend(self, q, k, v):
        q, k, v = (t.unflatten(2, (4, 4)) for t in (q, k, v))
        weights = (q @ k.mT * self.scale + self.bias).softmax(-1)
        return (weights @ v).flatten(2, 3)


class InBlocksThatSeeFour(Attention):
    """Its mask has five dimensions, too, and is the same for all but the last two."""

    def attend(self, q, k, v):
        q, k, v = (t.unflatten(2, (2, 8)) for t in (q, k, v))
        near = torch.ones(8, 8, device=q.device).tril().triu(-3)[None, None, None]
        scores = (q @ k.mT * self.scale).masked_fill(near == 0, -math.inf)
        return (scores.softmax(-1) @ v).flatten(2, 3)


class InGroups(Attention):
    """Two groups of heads, each with keys and values of its own."""
    key_heads = 2

    def attend(self, q, k, v):
        q, k, v = q.unflatten(1, (2, 2)), k.unsqueeze(2), v.unsqueeze(2)
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        y = weights @ v
        return y.flatten(1, 2)


class OverFrames(Attention):
    """Four frames of four pixels: each pixel sees itself in all frames."""

    def attend(self, q, k, v):
        q, k, v = (t.unflatten(2, (4, 4)) for t in (q, k, v))
        scores = torch.einsum("bhfpd,bhgpd->bhpfg", q, k) * self.scale
        return torch.einsum("bhpfg,bhgpd->bhfpd", scores.softmax(-1), v).flatten(2, 3)


class OneHeadOfKeys(Attention):
    key_heads = 1

    def attend(self, q, k, v):
        scores = torch.einsum("bhid,bjd->bhij", q, k[:, 0]) * self.scale
        return torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v[:, 0])


class OneHeadOfKeysLast(Attention):
    """Positions first."""
    key_heads = 1

    def attend(self, q, k, v):
        q, k, v = q.transpose(1, 2), k[:, 0], v[:, 0]
        scores = torch.einsum("bjd,bihd->bhij", k, q) * self.scale + self.minus
        return torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v)


class InGroupsByEinsum(Attention):
    key_heads = 2

    def attend(self, q, k, v):
        q = q.transpose(1, 2).unflatten(2, (2, 2))
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        weights = (torch.einsum("btkgd,bskd->bkgts", q, k) * self.scale).softmax(-1)
        return torch.einsum("bkgts,bskd->btkgd", weights, v).flatten(2, 3).transpose(1, 2)


class OneHeadOfKeysByBroadcasting(Attention):
    key_heads = 1

    def attend(self, q, k, v):
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        return weights @ v


class OneHeadOfKeysScaledInPlace(Attention):
    """Its queries have no name where they are multiplied."""
    key_heads = 1

    def attend(self, q, k, v):
        weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1)
        return weights @ v


class InScaledGroups(Attention):
    key_heads = 2

    def attend(self, q, k, v):
        q, k, v = q.unflatten(1, (2, 2)), k.unsqueeze(2), v.unsqueeze(2)
        weights = torch.softmax(self.scale * q @ k.mT, -1)
        return (weights @ v).flatten(1, 2)


RIGHT = (StepZero, NanoGPT, AddedMask, MaskedBeforeItIsScaled, PreScaled, WhereBlocked, FilledLikeItsScores,
         FilledWithANamedNumber, FilledWithANewTensor, Unmasked, OtherScale,
         LocalWindow, Slopes, InFloat32, ScoresInFloat32, ScoresInFloat32AtOnce, ValuesInFloat32,
         GroupedHeads, Einsum, EinsumAcross, Batched, InPlace,
         ValuesFirst, Pixels, EinsumValuesFirst, LessItsLargest, LessItsMaximum, Alibi,
         Cosine, DividedByATemperature, ShiftedByANumber, KeptFinite, ClampedFromBelow,
         WithItsWeights, WithItsWeightsAtOnce,
         SoftmaxByHand, ExponentialsOverTheirSum, NamedSum, NamedPlaces, NamedValues, LessItsLogarithm,
         OfALogSoftmax, DividedLate, DividedLateByName,
         InBlocks, InCausalBlocks, InBlocksWithABias, InBlocksThatSeeFour, InGroups, OverFrames,
         OneHeadOfKeys, OneHeadOfKeysLast, InGroupsByEinsum, OneHeadOfKeysByBroadcasting,
         OneHeadOfKeysScaledInPlace, InScaledGroups)


# ------------------------------------------------------------------------------------- what can't be rewritten, and why


class InBlocksWithABiasOfEachHead(InBlocksWithABias):
    """It differs between the dimensions that would become one."""

    def __init__(self):
        super().__init__()
        self.bias = torch.randn(HEADS, 1, 4, 4)


class ReturnsWeights(Attention):
    def attend(self, q, k, v):
        weights = (q @ k.mT * self.scale).softmax(-1)
        self.seen = weights.detach()
        return weights @ v + weights.mean()


class OverHeads(Attention):
    def attend(self, q, k, v):
        return (q @ k.mT * self.scale).softmax(1) @ v


class Gated(Attention):
    def attend(self, q, k, v):
        weights = (q @ k.mT * self.scale).softmax(-1)
        return (weights * self.tril) @ v


class Capped(Attention):
    def attend(self, q, k, v):
        scores = 30 * torch.tanh(q @ k.mT * self.scale / 30)
        return scores.softmax(-1) @ v


class PartlyWithoutGradients(Attention):
    def attend(self, q, k, v):
        with torch.no_grad():
            scores = q @ k.mT * self.scale
        return scores.softmax(-1) @ v


class OverQueries(Attention):
    """Each key takes of the values by its column of weights."""

    def attend(self, q, k, v):
        weights = (q @ k.mT * self.scale).softmax(-1)
        return weights.mT @ v


class ValuesByColumns(Attention):
    def attend(self, q, k, v):
        weights = (q @ k.mT * self.scale).softmax(-1)
        return (v.mT @ weights).mT


class MaskedBeforeItsTemperature(Attention):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def attend(self, q, k, v):
        scores = (q @ k.mT + self.minus) * self.temperature
        return scores.softmax(-1) @ v


class OneForEachKey(Attention):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.rand(LENGTH))

    def attend(self, q, k, v):
        return (q @ k.mT * self.weights).softmax(-1) @ v


class LessAnothersLargest(Attention):
    """Over the queries: that changes each key by another number."""

    def attend(self, q, k, v):
        scores = q @ k.mT * self.scale
        scores = scores - scores.amax(dim=-2, keepdim=True)
        return scores.softmax(-1) @ v


class TransposedBeforeEinsum(Attention):
    def attend(self, q, k, v):
        weights = (q @ k.mT * self.scale).softmax(-1)
        return torch.einsum("bhji,bhjd->bhid", weights.mT, v)


class CutOff(Attention):
    def attend(self, q, k, v):
        return (q @ k.mT * self.scale).clamp(min=-1.0).softmax(-1) @ v


class CutOffAbove(Attention):
    def attend(self, q, k, v):
        return (q @ k.mT * self.scale).clamp(-1e30, 1.0).softmax(-1) @ v


class FromANumber(Attention):
    def attend(self, q, k, v):
        return (1.0 - q @ k.mT * self.scale).softmax(-1) @ v


class ShiftedInsideItsCap(Attention):
    def attend(self, q, k, v):
        scores = 30 * torch.tanh((q @ k.mT * self.scale + 1.0) / 30)
        return scores.softmax(-1) @ v


REFUSED = {CutOff: "cut off", CutOffAbove: "cut off", FromANumber: "taken from something",
           ShiftedInsideItsCap: "before the tanh",
           OverQueries: "its weights are transposed", ValuesByColumns: "the second factor",
           TransposedBeforeEinsum: "multiplied by einsum", LessAnothersLargest: "more than once",
           MaskedBeforeItsTemperature: "put on before they are multiplied by a tensor",
           OneForEachKey: "multiplied by a tensor",
           ReturnsWeights: "more than once", OverHeads: "dimension 1", Gated: "stands mul",
           Capped: "see flex-attention", PartlyWithoutGradients: "without gradients"}
