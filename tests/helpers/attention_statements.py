"""Attention by hand whose statements do more than that: masks in several ways and places, dropout from elsewhere, names
that are used again. [B, S, E] -> [B, S, E], with a mask [B, 1, 1, S] that is true where a key is padding, or none."""
import math

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH = 16, 2, 12


class Attention(nn.Module):
    """`attend` takes [B, H, S, D] and gives that."""

    def __init__(self):
        super().__init__()
        self.qkv, self.drop, self.rate = nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(0.2), 0.2
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        self.register_buffer("future", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, x, padding=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v, padding).transpose(1, 2).flatten(2)


class MaskInBetween(Attention):
    def attend(self, q, k, v, padding):
        S = q.size(-2)
        att = (q @ k.transpose(-2, -1)) * 0.3
        seen = torch.ones(S, S, dtype=torch.bool)
        future = ~seen.tril()
        att = att.masked_fill(future, float("-inf"))
        att = att.softmax(dim=-1)
        return att @ v


class MaskIsReadAgain(Attention):
    def attend(self, q, k, v, padding):
        S = q.size(-2)
        att = q @ k.transpose(-2, -1)
        seen = torch.ones(S, S, dtype=torch.bool)
        seen = seen.tril()
        att = att.masked_fill(~seen, float("-inf"))
        y = att.softmax(dim=-1) @ v
        return y * seen.sum(-1, keepdim=True)


class MaskInALoop(Attention):
    def attend(self, q, k, v, padding):
        for _ in range(1):
            att = q @ k.transpose(-2, -1)
            seen = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).tril()
            att = att.masked_fill(~seen, float("-inf"))
            y = att.softmax(dim=-1) @ v
        return y


class MaskByAFunctionOfItsOwn(Attention):
    def attend(self, q, k, v, padding):
        att = q @ k.transpose(-2, -1)
        seen = self.seen(q.size(-2))
        att = att.masked_fill(~seen, float("-inf"))
        return att.softmax(dim=-1) @ v

    def seen(self, length):
        return ~self.future[:length, :length]


class BiasOnTheLeft(Attention):
    def attend(self, q, k, v, padding):
        scores = self.bias + torch.matmul(q, k.transpose(-1, -2))
        weights = F.softmax(scores, dim=-1)
        return torch.matmul(weights, v)


class TwoInOneStatement(Attention):
    def attend(self, q, k, v, padding):
        S = q.size(-2)
        seen = torch.zeros(S, S).masked_fill(self.future[:S, :S], -100.0)
        attn = (q * 0.5) @ k.transpose(-2, -1)
        attn = attn + self.bias[:, :S, :S].unsqueeze(0) + seen
        attn = attn.softmax(dim=-1)
        return (attn @ v)


class TwoFillsInAChain(Attention):
    def attend(self, q, k, v, padding):
        S = q.size(-2)
        hidden = torch.zeros(1, 1, 1, S, dtype=torch.bool) if padding is None else padding
        scores = q @ k.mT / math.sqrt(q.size(-1))
        scores = scores.masked_fill(self.future[:S, :S], -math.inf).masked_fill(hidden, -math.inf)
        return scores.softmax(-1) @ v


class CausalAlone(Attention):
    """Which the module's own buffer says; it has another name than self."""

    def attend(module, q, k, v, padding):
        S = q.size(-2)
        scores = q @ k.mT / math.sqrt(q.size(-1))
        scores = scores.masked_fill(module.future[:S, :S], -math.inf)
        return scores.softmax(-1) @ v


class CausalAsAnArgument(Attention):
    """Another caller may give another mask."""

    def attend(self, q, k, v, padding):
        S = q.size(-2)
        return self.masked(q, k, v, self.future[:S, :S])

    def masked(self, q, k, v, mask):
        scores = q @ k.mT / math.sqrt(q.size(-1))
        return scores.masked_fill(mask, -math.inf).softmax(-1) @ v


class OfOneDimension(Attention):
    """A bias for each key."""

    def attend(self, q, k, v, padding):
        scores = q @ k.mT / math.sqrt(q.size(-1)) + self.bias[0, 0, :k.size(-2)]
        return scores.softmax(-1) @ v


class HiddenKeys(Attention):
    def attend(self, q, k, v, padding):
        scores = q @ k.mT / math.sqrt(q.size(-1))
        scores = scores.masked_fill(self.future[4, :k.size(-2)], -math.inf)
        return scores.softmax(-1) @ v


class OptionalMask(Attention):
    def attend(self, q, k, v, padding):
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        # Padding is never looked at.
        if padding is not None:
            scores = scores.masked_fill(mask=padding, value=-1e9)
        weights = scores.softmax(dim=-1)
        return torch.matmul(weights, v)


class AddedWhereItIsGiven(Attention):
    def attend(self, q, k, v, padding):
        mask = None if padding is None else torch.where(padding, -1e9, 0.0)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores + mask
        weights = scores.softmax(dim=-1)
        return torch.matmul(weights, v)


class CausalAndOptional(Attention):
    def attend(self, q, k, v, padding):
        S = q.size(-2)
        scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
        scores = scores.masked_fill(self.future[:S, :S], float("-inf"))
        if padding is not None:
            scores = scores.masked_fill(padding, float("-inf"))
        return F.softmax(scores, -1) @ v


class OptionalThenAdded(Attention):
    def attend(self, q, k, v, padding):
        S = q.size(-2)
        scores = q @ k.transpose(-2, -1) / 3
        if padding is not None:
            scores = torch.where(padding, torch.finfo(scores.dtype).min, scores)
        scores = torch.add(scores, self.bias[:, :S, :S])
        scores = scores - 2.0 * self.future[:S, :S].to(scores.dtype)
        return F.softmax(scores, -1) @ v


class AddedBeforeItIsScaled(Attention):
    def attend(self, q, k, v, padding):
        S = q.size(-2)
        scores = (self.bias[:, :S, :S] + q @ k.mT) * 0.25
        return nn.functional.softmax(input=scores, dim=-1).matmul(v)


class DropoutAsAnArgument(Attention):
    @staticmethod
    def core(q, k, v, mask=None, dropout=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask, -math.inf)
        weights = scores.softmax(-1)
        if dropout is not None:
            weights = dropout(weights)
        return weights @ v

    def attend(self, q, k, v, padding):
        return self.core(q, k, v, padding, dropout=self.drop)


class DropoutOfAFunction(Attention):
    def attend(self, q, k, v, padding):
        weights = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)), dim=-1)
        weights = F.dropout(weights, p=self.drop.p, training=self.training)
        return weights @ v


class InPlace(Attention):
    def attend(self, q, k, v, padding):
        S = q.size(-2)
        scores = q @ k.transpose(-2, -1)
        scores *= q.size(-1) ** -0.5
        scores += self.bias[:, :S, :S]
        scores.masked_fill_(self.future[:S, :S], -math.inf)
        return scores.softmax(-1) @ v


class QueryChanges(Attention):
    def attend(self, q, k, v, padding):
        scores = torch.matmul(q, k.transpose(-1, -2)) * q.size(-1) ** -0.5
        q = q + 1
        y = scores.softmax(-1) @ v
        return y + 0 * q


class NamesAreUsedAgain(Attention):
    def attend(self, q, k, v, padding):
        S = q.size(-2)
        scores = torch.matmul(q, k.transpose(-1, -2)) * q.size(-1) ** -0.5
        mask = self.future[:S, :S] if padding is None else self.future[:S, :S] | padding
        scores = scores.masked_fill(mask, -math.inf)
        mask = scores.softmax(-1)
        v = v * 1.5                                      # it stays, with what is said of it
        return mask @ v


class MaskCutUnderTheCondition(Attention):
    """As transformers' eager attention."""

    def attend(self, q, k, v, padding):
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
        if padding is not None:
            hidden = padding[:, :, :, :k.shape[-2]]
            scores = scores + torch.where(hidden, -1e4, 0.0)
        weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        weights = nn.functional.dropout(weights, p=0.2 if self.training else 0.0, training=self.training)
        return torch.matmul(weights, v)


class NamesThatTheCallHas(Attention):
    """The caller's mask and its queries are called as what would be written."""

    def core(self, query, key, value, attn_mask=None):
        scores = query @ key.transpose(-2, -1) * 0.4
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask, -math.inf)
        query = 2 * query
        return scores.softmax(-1) @ value + 0 * query

    def attend(self, q, k, v, padding):
        return self.core(q, k, v, padding)


class ByEinsum(Attention):
    def attend(self, q, k, v, padding):
        energy = torch.einsum("nhqd,nhkd->nhqk", [q, k])
        if padding is not None:
            energy = energy.masked_fill(padding, float("-1e20"))
        weights = torch.softmax(energy / (WIDTH ** 0.5), dim=3)
        return torch.einsum("nhql,nhld->nhqd", [weights, v])


class ByEinsumAcross(Attention):
    """On [B, S, H, D]."""

    def attend(self, q, k, v, padding):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.5
        y = torch.einsum("bhqk,bkhd->bqhd", self.drop(scores.softmax(-1)), v)
        return y.transpose(1, 2)


class ByBatchedMatmuls(Attention):
    def attend(self, q, k, v, padding):
        heads = q.shape[:2]
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) / 2
        return torch.bmm(F.softmax(scores, dim=-1), v).unflatten(0, heads)


class OfStableDiffusion(Attention):
    """Its mask is changed in place, under a condition, by a number of the scores' dtype."""

    def attend(self, q, k, v, padding):
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.35
        if padding is not None:
            mask = padding.reshape(padding.shape[0], -1)
            max_neg_value = -torch.finfo(sim.dtype).max
            mask = mask[:, None, None].repeat(1, HEADS, 1, 1)
            sim.masked_fill_(mask, max_neg_value)
        attn = sim.softmax(dim=-1)
        out = torch.einsum("b h i j, b h j d -> b h i d", attn, v)
        return out


class LeastOfItsDtype(Attention):
    def attend(self, q, k, v, padding):
        scores = q @ k.mT / math.sqrt(q.size(-1))
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(self.future[:q.size(-2), :q.size(-2)], least)
        weights = scores.softmax(-1)
        return weights @ v


class ScaledByTheLength(Attention):
    """By the logarithm of a length to that which was trained on: 1 for the inputs that the tests give."""

    def attend(self, q, k, v, padding):
        scores = q @ k.mT * q.size(-1) ** -0.5 * math.log(q.size(-2), LENGTH)
        return scores.softmax(-1) @ v


class ScaledByANameOfTheLength(Attention):
    def attend(self, q, k, v, padding):
        B, H, length, width = q.shape
        scale = width ** -0.5
        if padding is None or padding is not None:
            scale = scale * math.log(length, LENGTH)
        scores = q @ k.mT * scale
        return scores.softmax(-1) @ v


class DividedTwice(Attention):
    def attend(self, q, k, v, padding):
        scores = q @ k.mT / math.sqrt(q.size(-1)) / math.log2(q.size(-2))
        return scores.softmax(-1) @ v


WRITTEN = (ScaledByTheLength, ScaledByANameOfTheLength, DividedTwice, OfStableDiffusion, LeastOfItsDtype,
           OfOneDimension, HiddenKeys, CausalAlone, CausalAsAnArgument,
           MaskCutUnderTheCondition, NamesThatTheCallHas, ByEinsum, ByEinsumAcross, ByBatchedMatmuls, BiasOnTheLeft,
           TwoInOneStatement, TwoFillsInAChain, OptionalMask, AddedWhereItIsGiven, CausalAndOptional, OptionalThenAdded,
           AddedBeforeItIsScaled, DropoutAsAnArgument, DropoutOfAFunction, InPlace, QueryChanges, NamesAreUsedAgain)


class Swapped(Attention):
    def attend(self, q, k, v, padding):
        scores = (k @ q.transpose(-1, -2)).transpose(-1, -2) * q.size(-1) ** -0.5
        return scores.softmax(-1) @ v


class LooksAtTheWeights(Attention):
    def attend(self, q, k, v, padding):
        scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        y = scores.softmax(-1) @ v
        self.shape = scores.shape
        return y


class KeepsItsWeightsAtTimes(Attention):
    keeps = False

    def attend(self, q, k, v, padding):
        weights = (q @ k.transpose(-1, -2) * q.size(-1) ** -0.5).softmax(-1)
        context = weights @ v
        if self.keeps:
            self.seen = weights
        return context


class OtherwiseSomethingElse(Attention):
    def attend(self, q, k, v, padding):
        scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        if padding is not None:
            scores = scores.masked_fill(padding, -math.inf)
            scores = scores * 2
        return scores.softmax(-1) @ v


NOT_WRITTEN = {KeepsItsWeightsAtTimes: "used for something else",
               Swapped: "transpose", LooksAtTheWeights: "something else", OtherwiseSomethingElse: "condition"}
