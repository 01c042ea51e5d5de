"""Attention by hand in a person's own statements, and the same by scaled_dot_product_attention.

The statements from the product of queries and keys to that with the values are read one by one: what becomes of the
scores, whichever branch ran. Statements that something else needs stay where they are, with their comments. What puts a
mask on becomes a statement that makes that mask, under the same condition.
"""
import ast
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.assistant import einsum
from benchmarks.assistant.attention import CASTS, SOFTMAX, Attention
from benchmarks.assistant.graph import place_of, shape_of
from benchmarks.assistant.source import Place, function_at, function_node_at, text_of
from benchmarks.assistant.statements import (
    assigned,
    lines_of,
    lines_with,
    loaded,
    needed_later,
    statements_of,
    target_of,
    with_code,
)
from benchmarks.assistant.technique import Advice, NotWritten
from benchmarks.assistant.words import called, is_of_module

MASK, QUERY, KEY = "attn_mask", "query", "key"       # the names that these get, where nothing has them yet
SCORE_MOD = "score_mod", "score", "b", "h", "q_idx", "kv_idx"        # and a score function, and what it is given
COMPILED = "compiled_flex_attention = torch.compile(flex.flex_attention, dynamic=False)"
CAUSAL_BLOCKS = """@functools.lru_cache(maxsize=8)
def causal_blocks(length, device):
    def allows(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx
    return flex.create_block_mask(allows, None, None, length, length, device=device)"""
OPERATIONS = {ast.Mult: "mul", ast.Div: "div", ast.Add: "add", ast.Sub: "sub"}
IGNORED = {"dim", "axis", "dtype", "inplace", "p", "training", "memory_format", "copy", "non_blocking"}
PLACES = {"input": 0, "condition": 0, "mask": 1, "other": 1, "mat2": 1, "value": 2}       # of a keyword
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

    def seen(self) -> str:
        """As a boolean mask: true where a position is seen."""
        if not self.blocks:
            return self.words
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
    is_softmax: bool = False                 # they are weights
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
class _Reader:
    """Follows the scores through statements of a file's text."""
    text: str
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
        if isinstance(node, ast.IfExp) and (self.value(node.body) or self.value(node.orelse)):
            raise NotWritten("its scores depend on a condition inside of an expression")
        self._look_below(node)
        return None

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
        scores, other = (left, node.right) if left and not left.value else (right, node.left)
        if scores is None or scores.value:
            return None
        name = OPERATIONS.get(type(node.op), "")
        if not name or (scores is not left and name in ("div", "sub")):
            raise NotWritten(f"its scores go through {ast.unparse(node)}")
        return self._by_name(name, scores, other)

    def _multiplied(self, scores: Scores, scale: str) -> Scores:
        if scores.is_softmax:
            raise NotWritten("its weights are multiplied by something")
        return scores.scaled(scale)

    def _with(self, scores: Scores, fill: Fill) -> Scores:
        if scores.is_softmax:
            raise NotWritten("something is done to its weights")
        return replace(scores, fills=(*scores.fills, fill))

    def _call(self, node: ast.Call) -> Scores | None:
        name, given = called(node).rstrip("_"), self._arguments(node)
        if name in ("matmul", "bmm") and len(given) == 2:
            return self._product(node, *given.values())
        if name == "einsum":
            return self._einsum(node)
        values = {key: self.value(argument) for key, argument in given.items()}
        places = [key for key, value in values.items() if value and not value.value]
        if not places:
            return None
        place, scores, rest = places[0], values[places[0]], [one for key, one in given.items() if key != places[0]]
        assert scores is not None
        if len(places) > 1:
            raise NotWritten(f"its scores go twice into {name}")
        if place == 0 and name in CASTS:
            return scores
        if place == 0 and name in SOFTMAX and not scores.is_softmax:
            return replace(scores, is_softmax=True)
        if place == 0 and name == "tanh" and not rest:
            return scores.capped()
        if place == 0 and scores.is_softmax:
            return replace(scores, dropout=self._dropout(node, name, rest))
        if (len(rest) == 1 and name in ("mul", "add")) or (place == 0 and name in ("div", "sub")):
            return self._by_name(name, scores, rest[0])
        if len(rest) == 2 and (name, place) in (("masked_fill", 0), ("where", 1), ("where", 2)):
            return self._with(scores, Fill(self.words(rest[0]), self.words(rest[1]), name != "where" or place == 2))
        if len(rest) == 2 and (name, place) == ("where", 0) and not is_of_module(node):
            return self._with(scores, Fill(self.words(rest[0]), self.words(rest[1]), blocks=False))
        raise NotWritten(f"its scores go through {name}")

    def _by_name(self, name: str, scores: Scores, other: ast.expr) -> Scores:
        if name in ("mul", "div"):
            sign = " * " if name == "mul" else " / "
            return self._multiplied(scores, sign + self.factor(other))
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
            return f"{_operand(rate)} if {_operand(training)} else 0.0"
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
        if weights is None or other is not None or not weights.is_softmax or weights.value:
            return None if weights and weights.value else self._refuse_product()
        self.output, self.found = node, replace(weights, value=self.words(right))
        return self.found

    def _einsum(self, node: ast.Call) -> Scores | None:
        equation, *operands = node.args
        if len(operands) == 1 and isinstance(operands[0], (ast.List, ast.Tuple)):
            operands = operands[0].elts
        values = [self.value(operand) for operand in operands]
        if len(operands) != 2 or not isinstance(equation, ast.Constant) or values[1] is not None:
            return self._refuse_product() if any(values) else None
        try:
            if values[0] is None:
                return self._scores_of_einsum(str(equation.value), *operands)
            of_values, of_result = einsum.of_output(str(equation.value))
        except einsum.NoProduct:
            return self._refuse_product() if any(values) else None
        if not values[0].is_softmax or values[0].value:
            return self._refuse_product()
        self.output, self.order = node, of_result
        self.found = replace(values[0], value=_permuted(self.words(operands[1]), of_values))
        return self.found

    def _scores_of_einsum(self, equation: str, left: ast.expr, right: ast.expr) -> Scores | None:
        keys_first, of_queries, of_keys = einsum.of_scores(equation)
        if not self.may_begin:
            return None
        queries, keys = (right, left) if keys_first else (left, right)
        key = _grouped(_permuted(self.words(keys), of_keys))
        return Scores(_permuted(self.words(queries), of_queries), f"{key}.mT")

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
            return ast.parse(f"{_grouped(self.names[node.value.id].query)}.{node.attr}", mode="eval").body
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.names:
            raise NotWritten(f"{node.id} is used for something else, too")
        return node


def _permuted(words: str, order: einsum.Order) -> str:
    """With its dimensions in that order."""
    return f"{_grouped(words)}.permute({', '.join(map(str, order))})" if order else words


def _grouped(words: str) -> str:
    node = ast.parse(words, mode="eval").body
    return words if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({words})"


# --------------------------------------------------------------------------------------------------------- statements


def advice(attention: Attention) -> Advice:
    """The call, in place of the statements from the one product to the other. Raises NotWritten."""
    start, end = place_of(attention.scores), place_of(attention.output)
    if start is None or end is None or start.function != end.function:
        raise NotWritten("its two products stand in different functions")
    return _Writer(attention, start, end).advice()


class _Writer:
    """Writes the lines of one attention anew."""

    def __init__(self, attention: Attention, start: Place, end: Place):
        self.attention, self.all_causal, self.file = attention, attention.is_causal, start.file
        self.reader = _Reader(text_of(self.file))
        self.statements = statements_of(start, end)
        self.mask, self.query, self.key = (self._free(name) for name in (MASK, QUERY, KEY))
        self.score_mod, *self.score_names = (self._free(name) for name in SCORE_MOD)
        self.kept: list[ast.stmt] = []                         # what stays, before the output's statement
        self.removed: dict[ast.stmt, int] = {}                 # and what does not, with how many masks it puts on

    def _free(self, name: str) -> str:
        """That name, or one like it, which nothing in the function has: a caller's own mask may be called so."""
        function = function_node_at(self.file, self.statements[0].lineno)
        nodes = list(ast.walk(function)) if function else []
        taken = {node.id for node in nodes if isinstance(node, ast.Name)}
        taken |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        while name in taken:
            name += "_"
        return name

    def advice(self) -> Advice:
        *before, last = self.statements
        for statement in before:
            self._read(statement)
            self.reader.may_begin = False
        if isinstance(last, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)) and last.value:
            self.reader.value(last.value)
        found, output = self.reader.found, self.reader.output
        if found is None or output is None:
            raise NotWritten("the product with the values is not read")
        self._refuse_other_uses(last)
        if (found.inside is None) != (self.attention.cap is None):
            raise NotWritten("the tanh of its soft cap is not read")
        lines = self._lines(found, output, last)
        first = self.statements[0]
        if len(lines) > 1 and text_of(self.file).split("\n")[first.lineno - 1][:first.col_offset].strip():
            raise NotWritten("several statements would stand in its place, and it shares a line with others")
        definitions: tuple[str, ...] = ()
        if found.inside is not None:
            definitions = (COMPILED, CAUSAL_BLOCKS) if self.all_causal else (COMPILED,)
        return Advice("\n".join(lines), Place(self.file, self.statements[0].lineno, last.end_lineno or last.lineno),
                      definitions=definitions)

    def _read(self, statement: ast.stmt) -> None:
        """Follow the scores through one statement."""
        if isinstance(statement, ast.If):
            if self._conditional(statement):
                return
        elif (target := target_of(statement)) is not None:
            name, value = target
            scores = self.reader.value(value)
            if self.reader.output is not None:
                raise NotWritten("its output stands in an earlier statement")
            if scores is not None:
                self.reader.names[name] = scores
                self.removed[statement] = len(scores.fills) - self._fills_until_now()
                return
            self.reader.names.pop(name, None)                  # it is something else now
        self.kept.append(statement)

    def _fills_until_now(self) -> int:
        return sum(self.removed.values())

    def _conditional(self, statement: ast.If) -> bool:
        """Whether something under a condition is done to the scores; then what it does is under it.

        What else stands there before that stays with it.
        """
        if not any((target := target_of(each)) and target[0] in self.reader.names for each in statement.body):
            return False
        if statement.orelse:
            raise NotWritten("its scores depend on a condition that does something else, too")
        test, count, before = self.reader.words(statement.test), 0, list[str]()
        if self._caps_under(test, statement):
            return True
        for each in statement.body:
            name, value = target_of(each) or ("", None)
            scores = self.reader.names.get(name)
            if scores is None or value is None:
                if loaded(each, None) & set(self.reader.names) or not isinstance(each, ast.Assign):
                    raise NotWritten("its scores depend on a condition that does something else, too")
                before += lines_of(each, text_of(self.file).split("\n"))
                continue
            new = self._under(test, scores, self.reader.value(value), tuple(before))
            self.reader.names[name] = new
            count += len(new.fills) - len(scores.fills)
            before = []
        if before:
            raise NotWritten("its scores depend on a condition that does something else, too")
        self.removed[statement] = count
        return True

    def _caps_under(self, test: str, statement: ast.If) -> bool:
        """Whether all that is under the condition puts a soft cap on the scores; then they have it under that."""
        names = {target[0] for each in statement.body if (target := target_of(each))}
        if len(names) != 1 or not all(map(target_of, statement.body)):
            return False
        (name,) = names
        before = after = self.reader.names[name]
        if before.fills or before.inside is not None:
            return False
        for each in statement.body:
            target = target_of(each)
            value = self.reader.value(target[1]) if target else None
            if value is None:
                break
            self.reader.names[name] = after = value
        self.reader.names[name] = before
        if value is None or after.inside is None or after.fills or after.is_softmax:
            return False
        self.reader.names[name] = after.capped_under(test, before)
        self.removed[statement] = 0
        return True

    @staticmethod
    def _under(test: str, before: Scores, after: Scores | None, lines: tuple[str, ...]) -> Scores:
        """What a statement under a condition makes of the scores."""
        if after is None or after.is_softmax != before.is_softmax:
            raise NotWritten("under a condition its scores become something else")
        if (after.scales, after.inside) != (before.scales, before.inside):
            raise NotWritten("under a condition its scores become something else")
        new = [replace(fill, test=test, lines=lines) for fill in after.fills[len(before.fills):]]
        dropout = after.dropout
        if dropout != before.dropout:
            dropout = f"({dropout}) if {test} else {before.dropout or '0.0'}"
        return replace(after, fills=(*before.fills, *new), dropout=dropout)

    def _refuse_other_uses(self, last: ast.stmt) -> None:
        """Raise NotWritten where a statement that stays needs a name that is gone."""
        gone = {name for statement in self.removed for name in assigned(statement)}
        if needed_later(gone, self.kept, last, self.reader.output, self.file):
            raise NotWritten("its scores are used for something else, too")

    def _lines(self, found: Scores, output: ast.expr, last: ast.stmt) -> list[str]:
        """The lines in place of the old ones."""
        self.all_causal = self.all_causal and self._is_always_causal(found)
        inline, saved = self._mask_inline(found), self._saved(found)
        masks = _Masks(self.mask, all(fill.only_blocks for fill in found.fills))
        fills = iter(found.fills)
        instead: dict[ast.stmt, list[str]] = {}
        for statement, count in self.removed.items():
            put_on = list(itertools.islice(fills, count))
            instead[statement] = [] if inline else masks.lines(put_on)
        text = text_of(self.file).split("\n")
        lines = [f"{', '.join(saved)} = {', '.join(saved.values())}"] if saved else []
        lines += lines_with(instead, self.statements[0], last, text)
        mask = self.mask
        if inline and found.fills:
            mask = masks.words(found.fills[0])
        elif not inline:
            lines += masks.lines(list(fills))                  # those in the statement of the output itself
        if found.inside is None:
            return [*lines, *with_code(last, output, self._call(found, saved, mask), text)]
        before, call = self._flex(found, saved, "" if self.all_causal or not found.fills else mask, masks)
        return [*lines, *before, *with_code(last, output, call, text)]

    def _flex(self, found: Scores, saved: dict[str, str], mask: str, masks: "_Masks") -> tuple[list[str], str]:
        """(the statements before it, the call of FlexAttention). Raises NotWritten."""
        if len(self.attention.shape) != 4:
            raise NotWritten("its scores have no heads: FlexAttention takes four dimensions")
        assert found.inside is not None
        query, key, named = self._operands_of_flex(found, saved)
        lines = [*named, *self._expanded(mask, masks.may_be_none, f"*{query}.shape[:-1], {key}.shape[-2]")]
        lines += [*([""] if lines else []), *self._score_mod(found, bool(mask), masks.may_be_none), ""]
        options = [f"scale={_product(found.outside if found.test else found.inside)}"]
        if self.all_causal:
            options.insert(0, f"block_mask=causal_blocks({query}.shape[-2], {query}.device)")
        given = ", ".join([query, key, found.value, self.score_mod, *options])
        return lines, _permuted(f"compiled_flex_attention({given})", self.reader.order)

    def _score_mod(self, found: Scores, is_masked: bool, may_be_none: bool) -> list[str]:
        """The function that caps a score, and masks it."""
        score, *places = self.score_names
        seen = f"{self.mask}[{', '.join(places)}]"
        lines = [f"def {self.score_mod}({', '.join(self.score_names)}):"]
        result = f"torch.tanh({score}){''.join(found.scales)}"
        if found.test:
            capped = f"{score} = torch.tanh({score}{''.join(found.inside or ())}){''.join(found.scales)}"
            lines += [f"    if {found.test}:", f"        {capped}"]
            result = score
        elif is_masked:
            lines.append(f"    {score} = {result}")
        if is_masked:
            result = f"{score} + {seen}"
            if all(fill.only_blocks for fill in found.fills):
                result = f'torch.where({seen}, {score}, -float("inf"))'
            result = f"{score} if {self.mask} is None else {result}" if may_be_none else result
        return [*lines, f"    return {result}"]

    def _operands_of_flex(self, found: Scores, saved: dict[str, str]) -> tuple[str, str, list[str]]:
        """(query, key, the statements that name them), for their shapes are asked for, too."""
        query = self.query if self.query in saved else found.query
        key = _without_transpose(self.key if self.key in saved else found.key, len(self.attention.shape))
        lines = []
        if not query.isidentifier():
            lines.append(f"{self.query} = {query}")
            query = self.query
        if not key.isidentifier():
            lines.append(f"{self.key} = {key}")
            key = self.key
        return query, key, lines

    def _expanded(self, mask: str, may_be_none: bool, sizes: str) -> list[str]:
        """The statement that gives a mask the shape of the scores."""
        if not mask:
            return []
        if may_be_none:
            return [f"if {mask} is not None:", f"    {self.mask} = {mask}.expand({sizes})"]
        return [f"{self.mask} = {_grouped(mask)}.expand({sizes})"]

    def _is_always_causal(self, found: Scores) -> bool:
        """Whether its masks are those that were seen, under no condition, and made of nothing that a caller may change.

        What a caller gives decides nothing but sizes.
        """
        if len(found.fills) != len(self.attention.masks) or any(fill.test for fill in found.fills):
            return False
        function = function_node_at(self.file, self.statements[0].lineno)
        if not isinstance(function, ast.FunctionDef):
            return False
        of_the_module = function.args.args[:1] if "." in function_at(self.file, function.lineno) else []
        arguments = [*function.args.args, *function.args.kwonlyargs]
        given = {argument.arg for argument in arguments if argument not in of_the_module}
        todo: list[ast.AST] = [ast.parse(fill.words) for fill in found.fills]
        seen = set[str]()
        while todo:
            expression = todo.pop()
            if any(isinstance(node, ast.IfExp) for node in ast.walk(expression)):
                return False
            names = _values_named(expression) - seen
            if names & given:
                return False
            seen |= names
            for node in ast.walk(function):
                if isinstance(node, ast.If) and names & assigned(node):
                    return False
                if isinstance(node, ast.Assign) and names & assigned(node):
                    todo.append(node.value)
        return True

    def _mask_inline(self, found: Scores) -> bool:
        """Whether one mask can stand in the call itself: nothing comes between that could change what it names."""
        is_one = len(found.fills) <= 1 and not any(fill.test for fill in found.fills)
        return self.all_causal or (is_one and not self.kept)

    def _saved(self, found: Scores) -> dict[str, str]:
        """Name -> words, of queries and keys that a statement in between assigns to."""
        changed = {name for statement in self.kept for name in assigned(statement)}
        saved = {}
        for name, words in ((self.query, found.query), (self.key, found.key)):
            if {node.id for node in ast.walk(ast.parse(words)) if isinstance(node, ast.Name)} & changed:
                saved[name] = words
        return saved

    def _call(self, found: Scores, saved: dict[str, str], mask: str) -> str:
        query = self.query if self.query in saved else found.query
        key = self.key if self.key in saved else found.key
        key = _without_transpose(key, len(self.attention.shape))
        options = []
        if self.all_causal:
            options.append("is_causal=True")
        elif found.fills:
            options.append(f"attn_mask={self._of_two_dimensions(found, mask)}")
        if found.dropout:
            options.append(f"dropout_p={found.dropout}")
        if scale := self._scale(found):
            options.append(f"scale={scale}")
        call = f"F.scaled_dot_product_attention({', '.join([query, key, found.value, *options])})"
        return _permuted(call, self.reader.order)

    def _of_two_dimensions(self, found: Scores, mask: str) -> str:
        """A mask of fewer, in words, as the function takes it. Raises NotWritten where it may be None."""
        missing = 2 - self.attention.dimensions_of_the_mask
        if missing <= 0 or not self.attention.masks:           # of what was not given nothing is known
            return mask
        if any(fill.test for fill in found.fills) or len(found.fills) != len(self.attention.masks):
            raise NotWritten("its mask has fewer than two dimensions, and may be left out")
        return f"{_grouped(mask)}[{', '.join(['None'] * missing)}]"

    def _scale(self, found: Scores) -> str:
        """"" where it is the one by default."""
        attention = self.attention
        width = shape_of(attention.query.node)[-1] if attention.query.order is None else 0
        if width and math.isclose(attention.scale, width ** -0.5, rel_tol=1e-6):
            return ""
        if len(found.scales) == 1:
            return found.scales[0].removeprefix(" * ") if found.scales[0].startswith(" * ") else f"1{found.scales[0]}"
        return repr(attention.scale)


def _product(scales: Sequence[str]) -> str:
    """Of " * x" and " / y", in words."""
    if not scales:
        return "1.0"
    first, *rest = scales
    return "".join([first.removeprefix(" * ") if first.startswith(" * ") else f"1{first}", *rest])


def _operand(words: str) -> str:
    return words if _grouped(words) == words or words.startswith(("torch.where(", "~")) else f"({words})"


class _Masks:
    """Writes the statements that make one mask of several."""

    def __init__(self, name: str, all_block: bool):
        self.name = name
        self.all_block = all_block           # then it is boolean: true where a position is seen
        self.is_there, self.may_be_none = False, False

    def lines(self, fills: Sequence[Fill]) -> list[str]:
        return [line for fill in fills for line in self._lines(fill)]

    def words(self, fill: Fill) -> str:
        return fill.seen() if self.all_block else fill.added()

    def _lines(self, fill: Fill) -> list[str]:
        alone = words = self.words(fill)
        first = not self.is_there
        if not first:
            words = f"{self.name} {'&' if self.all_block else '+'} {_operand(alone)}"
            words = f"{words} if {self.name} is not None else {alone}" if self.may_be_none else words
        self.may_be_none = bool(fill.test) and (first or self.may_be_none)
        self.is_there = True
        if not fill.test:
            return [f"{self.name} = {words}"]
        inside = [f"    {line}" for line in (*fill.lines, f"{self.name} = {words}")]
        return [*([f"{self.name} = None"] if first else []), f"if {fill.test}:", *inside]


def _values_named(expression: ast.AST) -> set[str]:
    """The names whose values it reads, not only their sizes, device or dtype."""
    shapes = {id(node.value) for node in ast.walk(expression)
              if isinstance(node, ast.Attribute) and node.attr in ("size", "shape", "device", "dtype")}
    return {node.id for node in ast.walk(expression)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in shapes}


def _without_transpose(key: str, ndim: int) -> str:
    """The keys as [..., S, D]."""
    last_two = {"-2", "-1"}, {str(ndim - 2), str(ndim - 1)}
    node = ast.parse(key, mode="eval").body
    if isinstance(node, ast.Attribute) and node.attr in ("mT", "T"):
        return ast.unparse(node.value)
    if isinstance(node, ast.Call) and called(node) in ("transpose", "swapaxes"):
        words = [ast.unparse(argument) for argument in (*node.args, *(each.value for each in node.keywords))]
        if is_of_module(node) and set(words[1:]) in last_two:
            return words[0]
        if isinstance(node.func, ast.Attribute) and set(words) in last_two:
            return ast.unparse(node.func.value)
    return f"{_grouped(key)}.transpose(-2, -1)"
