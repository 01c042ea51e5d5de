"""nn.MultiheadAttention that makes its attention weights where nobody reads them: no fused kernel has any."""
from dataclasses import dataclass

from torch import fx

from benchmarks.assistant.graph import Captured, Refusal, Refused, Region, regions, shape_of
from benchmarks.assistant.normal import name_of

FUNCTION = "multi_head_attention_forward"  # of torch's library, which the module calls
OPTION = "need_weights"                    # of the module and of the function; True by default


@dataclass(eq=False)
class UnreadWeights(Region):
    """One call of that function."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, L, S] of the output's L queries and S keys; both are [L, B, E] to the function."""
        query, key = (shape_of(each) for each in self.nodes[0].args[:2])
        return query[1], query[0], key[0]


def weights_in(graph: Captured) -> list[UnreadWeights | Refusal]:
    """Each call that makes weights; where they are read, why it must."""
    calls = [node for node in graph.nodes if node.op == "call_function" and name_of(node) == FUNCTION]
    return regions(graph, calls, _unread)


def _unread(node: fx.Node, graph: Captured) -> UnreadWeights | None:
    if not node.kwargs.get(OPTION, True):
        return None
    if any(_reads_weights(user) for user in node.users):
        raise Refused("its attention weights are read")
    query, key = (shape_of(each) for each in node.args[:2])
    return UnreadWeights(graph, (node,)) if len(query) == len(key) == 3 else None


def _reads_weights(user: fx.Node) -> bool:
    """Of what uses the pair that it returns: its output, and its weights."""
    return not (name_of(user) == "getitem" and (user.args[1] == 0 or not user.users))
