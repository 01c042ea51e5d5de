"""What becomes of the scores of an attention by hand, read from a person's statements: expression by expression."""
import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.assistant import einsum
from benchmarks.assistant.normal import CASTS
from benchmarks.assistant.operands import as_operand, grouped, permuted, transposed
from benchmarks.assistant.softmaxes import LOG_SOFTMAX, SOFTMAX
from benchmarks.assistant.technique import NotWritten
from benchmarks.assistant.words import called, is_of_module, literal
from benchmarks.measure.calls import BLOCKING

OPERATIONS = {ast.Mult: "mul", ast.Div: "div", ast.Add: "add", ast.Sub: "sub"}
IGNORED = {"dim", "axis", "dtype", "inplace", "p", "training", "memory_format", "copy", "non_blocking"}
TRANSPOSES = {"transpose", "swapaxes", "swapdims", "permute"}
PLACES = {"input": 0, "condition": 0, "mask": 1, "other": 1, "mat2": 1, "value": 2}       # of a keyword
KEEPS_AT_LEAST = ("max", "maximum", "clamp", "clip", "clamp_min")             # at a number
OF_ROWS = {"amax": "largest", "max": "largest", "sum": "sum", "logsumexp": "logsumexp"}
FILLED = {"full": 1, "full_like": 1, "new_full": 1, "tensor": 0, "new_tensor": 0, "scalar_tensor": 0}     # with what
INFINITE = {"float('-inf')", "-math.inf", "-torch.inf", "-np.inf", "-numpy.inf", "-float('inf')", "-inf",
            "float('-infinity')"}


@dataclass(frozen=True)
class Fill:
    """A mask, in words: added to the scores, or where it is true they become `value`."""
    words: str
    value: str = ""                          # of a boolean one
    blocks: bool = True                      # it is true where scores are blocked, not where they are seen
    factor: str = ""                         # what the scores are multiplied by behind it: " * 0.5 / 3"
    test: str = ""                           # the condition that it is put on under
    lines: tuple[str, ...] = ()              # statements that stand before it there

    @property
    def only_blocks(self) -> bool:
        """Whether all that it does is to leave positions out."""
        return self.value.replace('"', "'") in INFINITE

    @property
    def may_be_none(self) -> bool:
        """Whether it is a mask as it is named, put on where it is not None: the call takes it either way."""
        return self.test == f"{self.words} is not None" and not (self.lines or self.value or self.factor)

    def seen(self) -> str:
        """As a boolean mask: true where a position is seen."""
        if not self.blocks:
            return self.words
        node = ast.parse(self.words, mode="eval").body
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return ast.unparse(node.operand)
        return f"~{self.words}" if self.words.isidentifier() else f"~({self.words})"

    def added(self) -> str:
        """As a mask that is added to the scores."""
        if not self.value:
            return f"({self.words}){self.factor}" if self.factor else self.words
        either = (self.value, "0.0") if self.blocks else ("0.0", self.value)
        where = f"torch.where({self.words}, {', '.join(either)})"
        return where + self.factor if self.factor and not self.only_blocks else where


@dataclass(frozen=True)
class Scores:
    """What a name or an expression stands for, between the two products."""
    query: str
    key: str
    scales: tuple[str, ...] = ()             # " * x", " / y"
    inside: tuple[str, ...] | None = None    # those before the tanh of a soft cap, where there is one
    test: str = ""                           # the condition that the soft cap stands under
    outside: tuple[str, ...] = ()            # then those before that condition
    fills: tuple[Fill, ...] = ()
    is_exponential: bool = False             # of a softmax by hand, before it is divided by its sum
    is_logarithm: bool = False               # of a softmax
    of_rows: str = ""                        # it is that reduction of each row of these: one of `OF_ROWS`
    is_softmax: bool = False                 # they are weights
    is_transposed: bool = False              # as weights
    dropout: str = ""
    value: str = ""                          # the values that the weights were multiplied with: the output

    def capped(self) -> "Scores":
        """Behind a tanh. Raises NotWritten."""
        if self.fills or self.inside is not None or self.is_softmax:
            raise NotWritten("its scores go through a tanh that is no soft cap")
        return replace(self, scales=(), inside=self.scales)

    def capped_under(self, test: str, before: "Scores") -> "Scores":
        """What they are where a statement under a condition has put a soft cap on what they were before."""
        assert self.inside is not None
        return replace(self, test=test, outside=before.scales, inside=self.inside[len(before.scales):])

    def scaled(self, scale: str) -> "Scores":
        if self.test:
            raise NotWritten("its scores are multiplied behind a soft cap that stands under a condition")
        fills = tuple(replace(fill, factor=fill.factor + scale) for fill in self.fills)
        return replace(self, scales=(*self.scales, scale), fills=fills)


@dataclass
class Reader:
    """Follows the scores through statements of a file's text."""
    text: str
    dimensions: int                          # of the scores
    names: dict[str, Scores] = field(default_factory=dict)
    may_begin: bool = True                   # a product may be that of queries and keys
    output: ast.expr | None = None           # the expression that is the attention's output
    found: Scores | None = None              # what it stands for
    order: einsum.Order = None               # of [..., S, D] in it

    def value(self, node: ast.expr) -> Scores | None:
        """What an expression stands for; None where that is nothing of the attention. Raises NotWritten."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.BinOp):
            return self._operation(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Attribute) and node.attr == "mT" and (scores := self.value(node.value)):
            return self._transposed(scores)
        if isinstance(node, ast.Attribute) and node.attr == "values":          # of max along a dimension
            return self._largest(node.value)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == 0:
            return self._largest(node.value)
        if isinstance(node, ast.IfExp) and (self.value(node.body) or self.value(node.orelse)):
            raise NotWritten("its scores depend on a condition inside of an expression")
        self._look_below(node)
        return None

    def _largest(self, node: ast.expr) -> Scores | None:
        """The first of what max gives along a dimension, behind which are the places."""
        scores = self.value(node)
        if scores and scores.of_rows != "largest" and not scores.value:
            raise NotWritten(f"its scores go through {ast.unparse(node)}")
        return scores if scores and scores.of_rows else None

    def _look_below(self, node: ast.AST) -> None:
        """In what is nothing of the attention itself its output may stand."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
            elif isinstance(child, ast.keyword):
                self.value(child.value)

    def _operation(self, node: ast.BinOp) -> Scores | None:
        if isinstance(node.op, ast.MatMult):
            return self._product(node, node.left, node.right)
        left, right = self.value(node.left), self.value(node.right)
        if left and isinstance(node.op, ast.Sub) and right and right.of_rows:
            return self._less(left, right)
        if left and isinstance(node.op, ast.Div) and left.is_exponential:
            return self._divided(node, left, right)
        scores, other = (left, node.right) if left and not left.value else (right, node.left)
        if scores is None or scores.value:
            return None
        name = OPERATIONS.get(type(node.op), "")
        is_unread = scores.is_exponential or scores.is_logarithm or scores.of_rows or (left and right)
        if not name or is_unread or (scores is not left and name in ("div", "sub")):
            raise NotWritten(f"its scores go through {ast.unparse(node)}")
        return self._by_name(name, scores, other)

    @staticmethod
    def _less(scores: Scores, of_rows: Scores) -> Scores:
        """Less the largest of each row, of which a softmax takes no notice, or less its logsumexp."""
        if replace(of_rows, of_rows="") != scores or of_rows.of_rows in ("", "sum"):
            raise NotWritten("something is subtracted from its scores that is not read")
        return replace(scores, is_logarithm=True) if of_rows.of_rows == "logsumexp" else scores

    def _divided(self, node: ast.expr, exponentials: Scores, by: Scores | None) -> Scores:
        """Weights, or the output where they were multiplied with the values before.

        Raises NotWritten where the divisor is not the sum of each row of these exponentials.
        """
        if by != replace(exponentials, of_rows="sum", value=""):
            raise NotWritten("its exponentials are divided by something that is not read as their sum")
        weights = replace(exponentials, is_exponential=False, is_softmax=True)
        if weights.value:
            self.output, self.found = node, weights
        return weights

    def _reduced(self, name: str, scores: Scores) -> Scores:
        """A reduction of each row. Raises NotWritten for one that belongs to no softmax."""
        if scores.is_softmax or scores.is_logarithm or scores.is_exponential != (name == "sum"):
            raise NotWritten(f"its scores go through {name}")
        return replace(scores, of_rows=OF_ROWS[name])

    def _multiplied(self, scores: Scores, scale: str) -> Scores:
        if scores.is_softmax:
            raise NotWritten("its weights are multiplied by something")
        return scores.scaled(scale)

    def _with(self, scores: Scores, fill: Fill) -> Scores:
        if scores.is_softmax:
            raise NotWritten("something is done to its weights")
        return replace(scores, fills=(*scores.fills, fill))

    def _call(self, node: ast.Call) -> Scores | None:
        name = called(node).rstrip("_")
        if name in FILLED:                                     # it has their shape alone
            return None
        given = self._arguments(node)
        if name in ("matmul", "bmm") and len(given) == 2:
            return self._product(node, *given.values())
        if name == "einsum":
            return self._einsum(node)
        values = {key: self.value(argument) for key, argument in given.items()}
        first = values.get(0)
        if name == "div" and first and first.is_exponential and first.value and [*given] == [0, 1]:
            return self._divided(node, first, values[1])
        places = [key for key, value in values.items() if value and not value.value]
        if not places:
            return None
        place, scores, rest = places[0], values[places[0]], [one for key, one in given.items() if key != places[0]]
        assert scores is not None
        if places == [0, 1] and name in ("sub", "div"):
            other = values[1]
            assert other is not None
            return self._less(scores, other) if name == "sub" else self._divided(node, scores, other)
        if len(places) > 1:
            raise NotWritten(f"its scores go twice into {name}")
        if place == 0 and (name in CASTS or (name == "detach" and scores.of_rows == "largest")):
            return scores
        if scores.of_rows:
            raise NotWritten(f"the {scores.of_rows} of its rows goes through {name}")
        if place == 0 and name in KEEPS_AT_LEAST and not scores.is_softmax and len(rest) == 1 and _is_least(rest[0]):
            return scores
        if place == 0 and name in OF_ROWS:
            return self._reduced(name, scores)
        if place == 0 and name == "exp" and not rest and not scores.is_softmax and not scores.is_exponential:
            return replace(scores, is_logarithm=False, is_softmax=scores.is_logarithm,
                           is_exponential=not scores.is_logarithm)
        if scores.is_exponential or scores.is_logarithm:
            raise NotWritten(f"its exponentials go through {name}")
        if place == 0 and name in SOFTMAX and not scores.is_softmax:
            return replace(scores, is_softmax=True)
        if place == 0 and name in LOG_SOFTMAX and not scores.is_softmax:
            return replace(scores, is_logarithm=True)
        if place == 0 and name == "tanh" and not rest:
            return scores.capped()
        if place == 0 and name in TRANSPOSES and self._swaps_the_last(name, rest):
            return self._transposed(scores)
        if place == 0 and scores.is_softmax:
            return replace(scores, dropout=self._dropout(node, name, rest))
        if (len(rest) == 1 and name in ("mul", "add")) or (place == 0 and name in ("div", "sub")):
            return self._by_name(name, scores, rest[0])
        if len(rest) == 2 and (name, place) in (("masked_fill", 0), ("where", 1), ("where", 2)):
            value = self.words(_filled_with(rest[1]))
            return self._with(scores, Fill(self.words(rest[0]), value, name != "where" or place == 2))
        if len(rest) == 2 and (name, place) == ("where", 0) and not is_of_module(node):
            return self._with(scores, Fill(self.words(rest[0]), self.words(_filled_with(rest[1])), blocks=False))
        raise NotWritten(f"its scores go through {name}")

    def _swaps_the_last(self, name: str, dims: Sequence[ast.expr]) -> bool:
        count = self.dimensions
        if len(dims) == 1 and isinstance(dims[0], (ast.Tuple, ast.List)):
            dims = dims[0].elts
        try:
            places = [int(ast.literal_eval(dim)) % count for dim in dims]
        except (ValueError, TypeError):                        # no numbers
            return False
        last_two = [count - 1, count - 2]
        return places == [*range(count - 2), *last_two] if name == "permute" else sorted(places) == sorted(last_two)

    @staticmethod
    def _transposed(scores: Scores) -> Scores:
        if not scores.is_softmax:
            raise NotWritten("its scores are transposed")
        return replace(scores, is_transposed=not scores.is_transposed)

    def _by_name(self, name: str, scores: Scores, other: ast.expr) -> Scores:
        if name in ("mul", "div"):
            sign = " * " if name == "mul" else " / "
            return self._multiplied(scores, sign + self.factor(other))
        if isinstance(literal(other), (int, float)) and not scores.is_softmax:
            return scores                                      # a softmax takes no notice of it
        return self._with(scores, Fill(self.words(other) if name == "add" else f"-{self.factor(other)}"))

    def _arguments(self, node: ast.Call) -> dict[int | str, ast.expr]:
        """Of a call by place, of a method of the scores these first; a keyword whose place is known stands there."""
        given: list[ast.expr] = list(node.args)
        holder = node.func.value if isinstance(node.func, ast.Attribute) and not is_of_module(node) else None
        if holder is not None and (self.value(holder) or called(node) in ("matmul", "bmm")):
            given.insert(0, holder)
        found: dict[int | str, ast.expr] = dict(enumerate(given))
        for keyword in node.keywords:
            if keyword.arg in IGNORED:
                continue
            if keyword.arg == "alpha":
                raise NotWritten("something is added to its scores with a factor")
            place = PLACES.get(keyword.arg or "", keyword.arg or "**")
            found[place] = keyword.value
        return dict(sorted(found.items(), key=lambda each: str(each[0])))

    def _dropout(self, node: ast.Call, name: str, rest: Sequence[ast.expr]) -> str:
        """The rate, in words."""
        if name == "dropout" and is_of_module(node):
            words = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            rate = words.get("p", ast.unparse(rest[0]) if rest else "0.5")
            training = words.get("training", ast.unparse(rest[1]) if len(rest) > 1 else "True")
            return f"{as_operand(rate)} if {as_operand(training)} else 0.0"
        if rest or node.keywords or "drop" not in ast.unparse(node.func).lower():
            raise NotWritten(f"between the softmax and the product with the values stands {ast.unparse(node.func)}")
        module = ast.unparse(node.func)
        return f"{module}.p if {module}.training else 0.0"

    def _product(self, node: ast.expr, left: ast.expr, right: ast.expr) -> Scores | None:
        weights, other = self.value(left), self.value(right)
        if weights is None and other is None:
            if not self.may_begin:
                return None
            return Scores(self.words(left), self.words(right))
        if weights is None and other is not None and other.is_softmax and other.is_transposed and not other.value:
            self.order = (*range(self.dimensions - 2), self.dimensions - 1, self.dimensions - 2)
            self.output, self.found = node, replace(other, value=transposed(self.words(left), self.dimensions))
            return self.found
        if weights and weights.is_exponential and not (other or weights.value or weights.of_rows):
            return replace(weights, value=self.words(right))   # divided afterwards
        if weights is None or other is not None or not weights.is_softmax or weights.is_transposed or weights.value:
            return None if weights and weights.value else self._refuse_product()
        self.output, self.found = node, replace(weights, value=self.words(right))
        return self.found

    def _einsum(self, node: ast.Call) -> Scores | None:
        equation, *operands = node.args
        if len(operands) == 1 and isinstance(operands[0], (ast.List, ast.Tuple)):
            operands = operands[0].elts
        values = [self.value(operand) for operand in operands]
        if len(operands) != 2 or not isinstance(equation, ast.Constant) or all(values):
            return self._refuse_product() if any(values) else None
        weights, factor = (values[0], operands[1]) if values[0] else (values[1], operands[0])
        try:
            if weights is None:
                return self._scores_of_einsum(str(equation.value), *operands)
            of_values, of_result = einsum.of_output(str(equation.value), weights is values[0])
        except einsum.NoProduct:
            return self._refuse_product() if any(values) else None
        if not weights.is_softmax or weights.is_transposed or weights.value:
            return self._refuse_product()
        self.output, self.order = node, of_result
        self.found = replace(weights, value=permuted(self.words(factor), of_values))
        return self.found

    def _scores_of_einsum(self, equation: str, left: ast.expr, right: ast.expr) -> Scores | None:
        keys_first, of_queries, of_keys = einsum.of_scores(equation)
        if not self.may_begin:
            return None
        queries, keys = (right, left) if keys_first else (left, right)
        key = grouped(permuted(self.words(keys), of_keys))
        return Scores(permuted(self.words(queries), of_queries), f"{key}.mT")

    @staticmethod
    def _refuse_product() -> None:
        raise NotWritten("its scores go into another product")

    def words(self, node: ast.expr) -> str:
        """An expression that is nothing of the attention, as it is written. Raises NotWritten where it needs scores."""
        as_written = ast.get_source_segment(self.text, node) if hasattr(node, "end_lineno") else None
        parsed = ast.parse(ast.unparse(node), mode="eval").body
        changed = ast.unparse(_WithoutScores(self.names).visit(parsed))
        is_same = as_written and "\n" not in as_written and changed == ast.unparse(node)
        return as_written if as_written and is_same else changed

    def without_scores(self, statement: ast.stmt) -> ast.stmt:
        """A statement that asks the scores for no more than their dtype or device. Raises NotWritten where it does."""
        changed: ast.stmt = _WithoutScores(self.names).visit(copy.deepcopy(statement))
        return changed

    def factor(self, node: ast.expr) -> str:
        """The same, as a factor."""
        words = self.words(node)
        return words if isinstance(node, (ast.Name, ast.Constant, ast.Call, ast.Attribute)) else f"({words})"


class _WithoutScores(ast.NodeTransformer):
    """Their dtype and device are those of the queries; whatever else is asked of them is gone."""

    def __init__(self, names: dict[str, Scores]):
        self.names = names

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in self.names and node.attr in ("dtype", "device"):
            return ast.parse(f"{grouped(self.names[node.value.id].query)}.{node.attr}", mode="eval").body
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.names:
            raise NotWritten(f"{node.id} is used for something else, too")
        return node


def _is_least(node: ast.expr) -> bool:
    """Whether a number is so low that a score which is lower has no weight either way."""
    number = literal(node)
    if isinstance(number, (int, float)):
        return number <= BLOCKING
    inner = node.args[0] if isinstance(node, ast.Call) and called(node) == "tensor" and node.args else node
    return isinstance(inner, ast.Attribute) and inner.attr == "min" and called(inner.value) == "finfo"



def _filled_with(node: ast.expr) -> ast.expr:
    """The number of a tensor that is full of it; any other expression itself."""
    inner = node
    while isinstance(inner, ast.Call) and called(inner) in CASTS and isinstance(inner.func, ast.Attribute):
        inner = inner.func.value
    if not isinstance(inner, ast.Call) or called(inner) not in FILLED:
        return node
    by_name = [keyword.value for keyword in inner.keywords if keyword.arg == "fill_value"]
    return (by_name or inner.args[FILLED[called(inner)]:] or [node])[0]
