"""Attention by hand in a person's own statements, and one call for it: of SDPA, or of FlexAttention for a soft cap.

The statements from the product of queries and keys to that with the values are read one by one: what becomes of the
scores, whichever branch ran. Statements that something else needs stay where they are, with their comments. What puts a
mask on becomes a statement that makes that mask, under the same condition.
"""
import ast
import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.assistant.attention import Attention, missing_dimensions
from benchmarks.assistant.attention_reading import Fill, Reader, Scores
from benchmarks.assistant.graph import args_of, place_of, shape_of
from benchmarks.assistant.lengths import may_follow_a_length, values_named
from benchmarks.assistant.normal import name_of
from benchmarks.assistant.operands import as_operand, grouped, is_a_view, permuted, product, size_of, transposed
from benchmarks.assistant.program import Program
from benchmarks.assistant.source import Place, function_at, function_node_at, text_of
from benchmarks.assistant.statements import (
    assigned,
    first_of_two,
    is_returned_alone,
    lines_of,
    lines_with,
    loaded,
    needed_later,
    statements_of,
    target_of,
    with_code,
)
from benchmarks.assistant.technique import Advice, Found, NotWritten

MASK, QUERY, KEY = "attn_mask", "query", "key"       # the names that these get, where nothing has them yet
SCORE_MOD = "score_mod", "score", "b", "h", "q_idx", "kv_idx"        # and a score function, and what it is given
NOT_MADE = "the fused call gives no weights, and nothing used them"
SUPPORTS = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}      # what a model of transformers says
OF_MASKS = {"ones", "ones_like", "new_ones", "zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full",
            "arange", "tril", "triu", "bool", "to", "view", "unsqueeze", "expand", "size", "logical_not"}
COMPILED = "compiled_flex_attention = torch.compile(flex.flex_attention, dynamic=False)"
CAUSAL_BLOCKS = """@functools.lru_cache(maxsize=8)
def causal_blocks(length, device):
    def allows(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx
    return flex.create_block_mask(allows, None, None, length, length, device=device)"""


def advice(program: Program, found: Found, implementation: str) -> Advice:
    """The call, in place of the statements from the one product to the other. Raises NotWritten.

    A model of transformers has a switch for it, which knows the `implementation` by that name.
    """
    holder = _with_a_switch(program, found, implementation)
    if holder is not None and found.place and not found.place.is_yours:
        return Advice(f'{holder}.set_attn_implementation("{implementation}")')
    attention = found.region
    assert isinstance(attention, Attention)
    if attention.is_viewed:
        raise NotWritten("batch and heads are one dimension in a part of it: there is no code to write yet")
    start, end = place_of(attention.scores), place_of(attention.output)
    if start is None or end is None or start.function != end.function:
        raise NotWritten("its two products stand in different functions")
    return _Writer(attention, start, end).advice()


def _with_a_switch(program: Program, found: Found, implementation: str) -> str | None:
    """The outermost module around it that is a model of transformers and knows the `implementation`, as code."""
    names = found.module.partition(",")[0].split(".")
    for count in range(len(names) + 1):
        path = ".".join(names[:count])
        module = program.module_at(path)
        if hasattr(module, "set_attn_implementation"):
            if not getattr(module, SUPPORTS[implementation], True):
                return None
            is_code = all(name.isidentifier() for name in names[:count])
            return ".".join(["model", *names[:count]]) if is_code else f'model.get_submodule("{path}")'
    return None


class _Writer:
    """Writes the lines of one attention anew."""

    def __init__(self, attention: Attention, start: Place, end: Place):
        self.attention, self.all_causal, self.file = attention, attention.is_causal, start.file
        self.reader = Reader(text_of(self.file), len(attention.shape))
        self.statements = statements_of(start, end)
        self.mask, self.query, self.key = (self._free(name) for name in (MASK, QUERY, KEY))
        self.score_mod, *self.score_names = (self._free(name) for name in SCORE_MOD)
        self.kept: list[ast.stmt] = []                         # what stays, before the output's statement
        self.removed: dict[ast.stmt, int] = {}                 # and what does not, with how many masks it puts on
        self.changed: dict[ast.stmt, str] = {}                 # what stays, and asked the scores for their dtype

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
        returned = self._returned_weights(last, output)
        if (found.inside is None) != (self.attention.cap is None):
            raise NotWritten("the tanh of its soft cap is not read")
        lines = [f"{name} = None  # {NOT_MADE}" for name in returned] + self._lines(found, output, last)
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
        elif (target := target_of(statement) or first_of_two(statement)) is not None:
            name, value = target
            scores = self.reader.value(value)
            if self.reader.output is not None:
                raise NotWritten("its output stands in an earlier statement")
            if scores is not None:
                self.reader.names[name] = scores
                self.removed[statement] = len(scores.fills) - self._fills_until_now()
                return
            self.reader.names.pop(name, None)                  # it is something else now
        self.kept.append(self._without_scores(statement))

    def _without_scores(self, statement: ast.stmt) -> ast.stmt:
        """The same, where it asks the scores for no more than their dtype or device; else as it is."""
        if not loaded(statement, None) & set(self.reader.names):
            return statement
        with contextlib.suppress(NotWritten):
            changed = self.reader.without_scores(statement)
            self.changed[statement] = ast.unparse(changed)
            return changed
        return statement

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
                if not isinstance(each, ast.Assign):
                    raise NotWritten("its scores depend on a condition that does something else, too")
                asks = loaded(each, None) & set(self.reader.names)
                as_it_is = lines_of(each, text_of(self.file).split("\n"))
                before += [ast.unparse(self.reader.without_scores(each))] if asks else as_it_is
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
        targets = [target for each in statement.body if (target := target_of(each))]
        names = {name for name, _ in targets}
        if len(names) != 1 or len(targets) < len(statement.body):
            return False
        (name,) = names
        before = self.reader.names[name]
        if before.fills or before.inside is not None:
            return False
        after: Scores | None = before
        for _, value in targets:
            after = self.reader.value(value)
            if after is None:
                break
            self.reader.names[name] = after                # what the next statement reads
        self.reader.names[name] = before
        if after is None or after.inside is None or after.fills or after.is_softmax:
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

    def _returned_weights(self, last: ast.stmt, output: ast.expr) -> list[str]:
        """The names of weights that the function returns beside its output: in this model nothing uses them.

        Raises NotWritten where a statement that stays needs a name that is gone otherwise.
        """
        gone = {name for statement in self.removed for name in assigned(statement)}
        needed = needed_later(gone, self.kept, last, output, self.file)
        of_kept = {name for statement in self.kept for name in loaded(statement, None)}
        for name in needed:
            scores = self.reader.names.get(name)
            is_weights = scores is not None and scores.is_softmax and not scores.value
            if not is_weights or name in of_kept or not is_returned_alone(name, last, output, self.file):
                raise NotWritten("its scores are used for something else, too")
        return sorted(needed)

    def _lines(self, found: Scores, output: ast.expr, last: ast.stmt) -> list[str]:
        """The lines in place of the old ones."""
        self.all_causal = self.all_causal and self._is_always_causal(found)
        inline, saved = self._mask_inline(found), self._saved(found)
        masks = _Masks(self.mask, all(fill.only_blocks for fill in found.fills))
        fills = iter(found.fills)
        instead: dict[ast.stmt, list[str]] = {statement: [words] for statement, words in self.changed.items()}
        for statement, count in self.removed.items():
            put_on = list(itertools.islice(fills, count))
            instead[statement] = [] if inline else masks.lines(put_on)
        if self.all_causal:
            instead |= {statement: [] for statement in self._masks_needed_no_longer(found, last, output)}
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

    def _masks_needed_no_longer(self, found: Scores, last: ast.stmt, output: ast.expr) -> list[ast.stmt]:
        """The statements in between that make nothing but a mask which the call says by `is_causal`.

        None where the function has a loop: its next turn may read them.
        """
        function = function_node_at(self.file, last.lineno)
        if function is None or any(isinstance(node, (ast.For, ast.While)) for node in ast.walk(function)):
            return []
        masks = set[str]().union(*(values_named(ast.parse(fill.words)) for fill in found.fills))
        dropped: list[ast.stmt] = []
        for place, statement in reversed(list(enumerate(self.kept))):
            target = target_of(statement)
            if not isinstance(statement, ast.Assign) or target is None or target[0] not in masks:
                continue
            behind = [each for each in self.kept[place + 1:] if each not in dropped]
            if _makes_a_mask_alone(target[1]) and not needed_later({target[0]}, behind, last, output, self.file):
                dropped.append(statement)
                masks |= values_named(target[1])
        return dropped

    def _flex(self, found: Scores, saved: dict[str, str], mask: str, masks: "_Masks") -> tuple[list[str], str]:
        """(the statements before it, the call of FlexAttention). Raises NotWritten."""
        if len(self.attention.shape) != 4:
            raise NotWritten("its scores have no heads: FlexAttention takes four dimensions")
        assert found.inside is not None
        query, key, named = self._operands_of_flex(found, saved)
        lines = [*named, *self._expanded(mask, masks.may_be_none, f"*{query}.shape[:-1], {key}.shape[-2]")]
        lines += [*([""] if lines else []), *self._score_mod(found, bool(mask), masks.may_be_none), ""]
        options = [f"scale={product(found.outside if found.test else found.inside)}"]
        if self.all_causal:
            options.insert(0, f"block_mask=causal_blocks({query}.shape[-2], {query}.device)")
        operands = [query, key, found.value]
        if self.attention.device.type == "cpu":                # Inductor can't compile it on views of a matmul's output
            operands = [self._dense(operand, True) for operand in operands]
        given = ", ".join([*operands, self.score_mod, *options])
        return lines, permuted(f"compiled_flex_attention({given})", self.reader.order)

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
        key = transposed(self.key if self.key in saved else found.key, len(self.attention.shape))
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
        return [f"{self.mask} = {grouped(mask)}.expand({sizes})"]

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
            names = values_named(expression) - seen
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
        is_one = len(found.fills) <= 1 and not any(fill.test and not fill.may_be_none for fill in found.fills)
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
        key = transposed(key, len(self.attention.shape))
        options = []
        if self.all_causal:
            options.append("is_causal=True")
        elif found.fills:
            options.append(f"attn_mask={self._of_enough_dimensions(found, mask)}")
        if found.dropout:
            options.append(f"dropout_p={found.dropout}")
        if scale := self._scale(found):
            options.append(f"scale={scale}")
        sized = self._unscaled(query)
        query = self._with_temperatures(query, found)
        operands = [self._dense(words, each.needs_a_copy) for words, each
                    in zip((query, key, found.value), self.attention.operands, strict=True)]
        if is_a_view(sized) and not any(self.attention.query.is_broadcast(self.attention.leading)):
            operands = [self._whole(words, operand.is_broadcast(self.attention.leading), sized)
                        for words, operand in zip(operands, self.attention.operands, strict=True)]
        elif self.attention.merged > 1:
            raise NotWritten(f"queries of {len(self.attention.shape)} dimensions have no name, or are broadcast")
        if self.attention.merged > 1:
            return permuted(self._merged(operands, options, sized), self.reader.order)
        if not self._lacks_a_dimension(found):
            return permuted(f"F.scaled_dot_product_attention({', '.join([*operands, *options])})", self.reader.order)
        operands = [f"{grouped(words)}.unsqueeze(0)" for words in operands]
        call = f"F.scaled_dot_product_attention({', '.join([*operands, *options])}).squeeze(0)"
        return permuted(call, self.reader.order)

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

    def _lacks_a_dimension(self, found: Scores) -> bool:
        """Whether batch and heads are one: the fused kernels take four dimensions alone. A mask of three that may be
        None gets none, so then nothing does.
        """
        has_three = self.attention.dimensions_of_the_mask == 3
        return len(self.attention.shape) == 3 and not (has_three and self._may_be_none(found))

    def _may_be_none(self, found: Scores) -> bool:
        """Whether a mask may be left out, as far as is seen."""
        return any(fill.test for fill in found.fills) or len(found.fills) != len(self.attention.masks)

    def _with_temperatures(self, query: str, found: Scores) -> str:
        """The queries, multiplied by what the scores were. Raises NotWritten where numbers are among that."""
        count = len(self.attention.temperatures)
        if not count:
            return query
        if count != len(found.scales):
            raise NotWritten("its scores are multiplied by a tensor, and by a number")
        return f"({grouped(query)}{''.join(found.scales)})"

    @staticmethod
    def _dense(operand: str, needs_a_copy: bool) -> str:
        return f"{grouped(operand)}.contiguous()" if needs_a_copy else operand

    def _of_enough_dimensions(self, found: Scores, mask: str) -> str:
        """A mask of fewer, in words, as the fused kernels take it. Raises NotWritten where it may be None."""
        whole = 4 if self.attention.merged > 1 else len(self.attention.shape)
        missing = missing_dimensions(self.attention, whole)
        if not self.attention.masks:                           # of what was not given nothing is known
            return mask
        if self.attention.dimensions_of_the_mask == 3 and self._lacks_a_dimension(found):
            return f"{grouped(mask)}.unsqueeze(0)"
        if missing < 0 and self.attention.merged > 1:
            return f"{grouped(mask)}.flatten(0, {-missing})"
        if missing <= 0:
            return mask
        if self._may_be_none(found):
            if self.attention.dimensions_of_the_mask >= 2:     # it is right, and on a CPU slower
                return mask
            raise NotWritten("its mask has fewer than two dimensions, and may be left out")
        return f"{grouped(mask)}[{', '.join(['None'] * missing)}]"

    def _scale(self, found: Scores) -> str:
        """"" where it is the one by default."""
        attention = self.attention
        if attention.temperatures:
            return repr(attention.scale)
        width = shape_of(attention.query.node)[-1] if attention.query.order is None else 0
        is_default = width and math.isclose(attention.scale, width ** -0.5, rel_tol=1e-6)
        function = function_node_at(self.file, self.statements[0].lineno)
        if is_default and not may_follow_a_length([product([scale]) for scale in found.scales], function):
            return ""
        return product(found.scales) if found.scales else repr(attention.scale)




def _makes_a_mask_alone(expression: ast.expr) -> bool:
    """Whether it calls nothing but functions of torch's that make a mask, and methods that change its form."""
    calls = [node.func for node in ast.walk(expression) if isinstance(node, ast.Call)]
    return bool(calls) and all(isinstance(call, ast.Attribute) and call.attr in OF_MASKS for call in calls)



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
            words = f"{self.name} {'&' if self.all_block else '+'} {as_operand(alone)}"
            words = f"{words} if {self.name} is not None else {alone}" if self.may_be_none else words
        self.may_be_none = bool(fill.test) and (first or self.may_be_none)
        self.is_there = True
        if not fill.test:
            return [f"{self.name} = {words}"]
        inside = [f"    {line}" for line in (*fill.lines, f"{self.name} = {words}")]
        return [*([f"{self.name} = None"] if first else []), f"if {fill.test}:", *inside]
