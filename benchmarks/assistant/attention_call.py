"""One call of torch's attention for what a person's statements compute by hand."""
import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.assistant import einsum
from benchmarks.assistant.attention import Attention, missing_dimensions
from benchmarks.assistant.attention_reading import Scores
from benchmarks.assistant.graph import args_of, dtype_of, shape_of
from benchmarks.assistant.lengths import may_follow_a_length
from benchmarks.assistant.normal import name_of
from benchmarks.assistant.operands import grouped, is_a_view, permuted, product, size_of, transposed
from benchmarks.assistant.technique import NotWritten
from benchmarks.assistant.words import called


def dense(operand: str, needs_a_copy: bool) -> str:
    """An operand, copied where its strides are none that a kernel takes."""
    return f"{grouped(operand)}.contiguous()" if needs_a_copy else operand


def in_one_dtype(attention: Attention, words: Sequence[str]) -> list[str]:
    """Queries, keys and values; the first two are cast where these have another dtype."""
    query, key, value = words
    if not attention.mixes_dtypes:
        return [query, key, value]
    dtype = f"{grouped(value)}.dtype" if is_a_view(value) else str(dtype_of(attention.value.node))
    return [*(f"{_uncast(each)}.to({dtype})" for each in (query, key)), value]


def _uncast(words: str) -> str:
    """Without a cast at its end: another one follows."""
    node = ast.parse(words, mode="eval").body
    if isinstance(node, ast.Call) and called(node) == "float" and isinstance(node.func, ast.Attribute):
        words = ast.unparse(node.func.value)
    return grouped(words)


@dataclass(frozen=True)
class FusedCall:
    """The call in words, of what became of the scores."""
    attention: Attention
    found: Scores
    query: str                             # in words
    key: str                               # as the queries are multiplied by it
    is_causal: bool                        # its masks hide the future alone, whoever calls it
    order: einsum.Order                    # in which the statements permute its output
    function: ast.AST | None               # that they stand in

    def words(self, mask: str) -> str:
        """The call; `mask` is that of its scores, in words. Raises NotWritten."""
        options, operands = self._options(mask), self._operands()
        sized = self._unscaled(self.query)
        if is_a_view(sized) and not any(self.attention.query.is_broadcast(self.attention.leading)):
            operands = [self._whole(words, operand.is_broadcast(self.attention.leading), sized)
                        for words, operand in zip(operands, self.attention.operands, strict=True)]
        elif self.attention.merged > 1:
            raise NotWritten(f"queries of {len(self.attention.shape)} dimensions have no name, or are broadcast")
        if self.attention.merged > 1:
            return permuted(self._merged(operands, options, sized), self.order)
        if not self._lacks_a_dimension():
            return permuted(f"F.scaled_dot_product_attention({', '.join([*operands, *options])})", self.order)
        operands = [f"{grouped(words)}.unsqueeze(0)" for words in operands]
        call = f"F.scaled_dot_product_attention({', '.join([*operands, *options])}).squeeze(0)"
        return permuted(call, self.order)

    def _options(self, mask: str) -> list[str]:
        options = []
        if self.is_causal:
            options.append("is_causal=True")
        elif self.found.fills:
            options.append(f"attn_mask={self._of_enough_dimensions(mask)}")
        if self.found.dropout:
            options.append(f"dropout_p={self.found.dropout}")
        if scale := self._scale():
            options.append(f"scale={scale}")
        return options

    def _operands(self) -> list[str]:
        """Queries, keys and values."""
        key = transposed(self.key, len(self.attention.shape))
        words = in_one_dtype(self.attention, [self._with_temperatures(), key, self.found.value])
        return [dense(each, operand.needs_a_copy) for each, operand
                in zip(words, self.attention.operands, strict=True)]

    def _merged(self, operands: Sequence[str], options: Sequence[str], query: str) -> str:
        """The call with the first dimensions as one, whose sizes are those of the queries."""
        count = self.attention.merged
        merged = [f"{grouped(words)}.flatten(0, {count - 1})" for words in operands]
        call = f"F.scaled_dot_product_attention({', '.join([*merged, *options])})"
        return f"{call}.unflatten(0, ({', '.join(size_of(query, dim) for dim in range(count))}))"

    def _unscaled(self, query: str) -> str:
        """What has the shape of the queries: of a product with a number the other factor."""
        made, node = ast.parse(query, mode="eval").body, self.attention.query.node
        if not isinstance(made, ast.BinOp) or name_of(node) not in ("mul", "div") or len(args_of(node)) != 2:
            return query
        left, right = args_of(node)
        if isinstance(right, (int, float)):
            return ast.unparse(made.left)
        return ast.unparse(made.right) if isinstance(left, (int, float)) else query

    @staticmethod
    def _whole(operand: str, is_broadcast: list[bool], query: str) -> str:
        """Keys or values, expanded along the dimensions where they are broadcast to the queries."""
        if not any(is_broadcast):
            return operand
        sizes = [size_of(query, dim) if one else "-1" for dim, one in enumerate(is_broadcast)]
        return f"{grouped(operand)}.expand({', '.join([*sizes, '-1', '-1'])})"

    def _lacks_a_dimension(self) -> bool:
        """Whether batch and heads are one: the fused kernels take four dimensions alone. A mask of three that may be
        None gets none, so then nothing does.
        """
        has_three = self.attention.dimensions_of_the_mask == 3
        return len(self.attention.shape) == 3 and not (has_three and self._may_be_none())

    def _may_be_none(self) -> bool:
        """Whether a mask may be left out, as far as is seen."""
        return any(fill.test for fill in self.found.fills) or len(self.found.fills) != len(self.attention.masks)

    def _with_temperatures(self) -> str:
        """The queries, multiplied by what the scores were. Raises NotWritten where numbers are among that."""
        count = len(self.attention.temperatures)
        if not count:
            return self.query
        if count != len(self.found.scales):
            raise NotWritten("its scores are multiplied by a tensor, and by a number")
        return f"({grouped(self.query)}{''.join(self.found.scales)})"

    def _of_enough_dimensions(self, mask: str) -> str:
        """A mask of fewer, in words, as the fused kernels take it. Raises NotWritten where it may be None."""
        whole = 4 if self.attention.merged > 1 else len(self.attention.shape)
        missing = missing_dimensions(self.attention, whole)
        if not self.attention.masks:                           # of what was not given nothing is known
            return mask
        if self.attention.dimensions_of_the_mask == 3 and self._lacks_a_dimension():
            return f"{grouped(mask)}.unsqueeze(0)"
        if missing < 0 and self.attention.merged > 1:
            return f"{grouped(mask)}.flatten(0, {-missing})"
        if missing <= 0:
            return mask
        if self._may_be_none():
            if self.attention.dimensions_of_the_mask >= 2:     # it is right, and on a CPU slower
                return mask
            raise NotWritten("its mask has fewer than two dimensions, and may be left out")
        return f"{grouped(mask)}[{', '.join(['None'] * missing)}]"

    def _scale(self) -> str:
        """"" where it is the one by default."""
        attention = self.attention
        if attention.temperatures:
            return repr(attention.scale)
        width = shape_of(attention.query.node)[-1] if attention.query.order is None else 0
        is_default = width and math.isclose(attention.scale, width ** -0.5, rel_tol=1e-6)
        if is_default and not may_follow_a_length([product([scale]) for scale in self.found.scales], self.function):
            return ""
        return product(self.found.scales) if self.found.scales else repr(attention.scale)
