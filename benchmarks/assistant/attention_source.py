"""Attention by hand in a person's own statements, and one call for it: of SDPA, or of FlexAttention for a soft cap.

The statements from the product of queries and keys to that with the values were read one by one, whichever branch ran:
`attention_statements`. Statements that something else needs stay where they are, with their comments. What puts a
mask on becomes a statement that makes that mask, under the same condition.
"""
import ast
import itertools
from collections.abc import Sequence

from benchmarks.assistant.attention import Attention
from benchmarks.assistant.attention_call import FusedCall, dense, in_one_dtype
from benchmarks.assistant.attention_reading import Fill, Scores
from benchmarks.assistant.attention_statements import StatementReader
from benchmarks.assistant.graph import place_of
from benchmarks.assistant.lengths import values_named
from benchmarks.assistant.operands import as_operand, grouped, permuted, product, transposed
from benchmarks.assistant.program import Program
from benchmarks.assistant.source import Place, function_at, function_node_at, text_of
from benchmarks.assistant.statements import (
    assigned,
    lines_with,
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
            "arange", "tril", "triu", "bool", "to", "view", "unsqueeze", "expand", "size", "logical_not",
            "tensor", "finfo"}                           # and what they fill in
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
        self.reading = StatementReader(self.file, len(attention.shape))
        self.statements = statements_of(start, end)
        self.mask, self.query, self.key = (self._free(name) for name in (MASK, QUERY, KEY))
        self.score_mod, *self.score_names = (self._free(name) for name in SCORE_MOD)

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
            self.reading.read(statement)
            self.reading.reader.may_begin = False
        if isinstance(last, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)) and last.value:
            self.reading.reader.value(last.value)
        found, output = self.reading.reader.found, self.reading.reader.output
        if found is None or output is None:
            raise NotWritten("the product with the values is not read")
        returned = self.reading.returned_weights(last, output)
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

    def _lines(self, found: Scores, output: ast.expr, last: ast.stmt) -> list[str]:
        """The lines in place of the old ones."""
        self.all_causal = self.all_causal and self._is_always_causal(found)
        inline, saved = self._mask_inline(found), self._saved(found)
        masks = _Masks(self.mask, all(fill.only_blocks for fill in found.fills))
        fills = iter(found.fills)
        instead: dict[ast.stmt, list[str]] = {statement: [words] for statement, words in self.reading.changed.items()}
        for statement, count in self.reading.removed.items():
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
            return [*lines, *with_code(last, output, self._fused(found, saved).words(mask), text)]
        before, call = self._flex(found, saved, "" if self.all_causal or not found.fills else mask, masks)
        return [*lines, *before, *with_code(last, output, call, text)]

    def _masks_needed_no_longer(self, found: Scores, last: ast.stmt, output: ast.expr) -> list[ast.stmt]:
        """The statements in between that make nothing but a mask which the call says by `is_causal`.

        None where the function has a loop: its next turn may read them.
        """
        function = function_node_at(self.file, last.lineno)
        if function is None or any(isinstance(node, (ast.For, ast.While)) for node in ast.walk(function)):
            return []
        masks = set[str]().union(*(values_named(ast.parse(words)) for fill in found.fills
                                   for words in (fill.words, fill.value)))
        dropped: list[ast.stmt] = []
        for place, statement in reversed(list(enumerate(self.reading.kept))):
            target = target_of(statement)
            if not isinstance(statement, ast.Assign) or target is None or target[0] not in masks:
                continue
            behind = [each for each in self.reading.kept[place + 1:] if each not in dropped]
            if _makes_a_mask_alone(target[1]) and not needed_later({target[0]}, behind, last, output, self.file):
                dropped.append(statement)
                masks |= values_named(target[1])
        return dropped

    def _fused(self, found: Scores, saved: dict[str, str]) -> FusedCall:
        query, key = self._queries_and_keys(found, saved)
        function = function_node_at(self.file, self.statements[0].lineno)
        return FusedCall(self.attention, found, query, key, self.all_causal, self.reading.reader.order, function)

    def _queries_and_keys(self, found: Scores, saved: dict[str, str]) -> tuple[str, str]:
        """In words, by the names that some were given."""
        return self.query if self.query in saved else found.query, self.key if self.key in saved else found.key

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
        operands = in_one_dtype(self.attention, [query, key, found.value])
        if self.attention.device.type == "cpu":                # Inductor can't compile it on views of a matmul's output
            operands = [dense(operand, True) for operand in operands]
        given = ", ".join([*operands, self.score_mod, *options])
        return lines, permuted(f"compiled_flex_attention({given})", self.reading.reader.order)

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
        query, key = self._queries_and_keys(found, saved)
        key = transposed(key, len(self.attention.shape))
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
        return self.all_causal or (is_one and not self.reading.kept)

    def _saved(self, found: Scores) -> dict[str, str]:
        """Name -> words, of queries and keys that a statement in between assigns to."""
        changed = {name for statement in self.reading.kept for name in assigned(statement)}
        saved = {}
        for name, words in ((self.query, found.query), (self.key, found.key)):
            if {node.id for node in ast.walk(ast.parse(words)) if isinstance(node, ast.Name)} & changed:
                saved[name] = words
        return saved


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
