"""What is put into a template before it is compiled, so that it can be stopped.

Everything that repeats takes a step, and what visits many values at once becomes a call of the
environment (:mod:`uma_trio.text.sandbox`), which can refuse.
"""

from __future__ import annotations

from typing import Final

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

_SHORT_CONSTANT: Final = 64  # characters


class Instrument(NodeTransformer):
    """Puts a step into everything that repeats, and bounds ``~``.

    `EnvironmentAttribute` compiles to a look at the environment itself, which a template
    cannot name, so it cannot replace what is called there.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        """Step at every turn, and at every item that ``for ... if`` looks at."""
        self.generic_visit(node)
        node.body.insert(0, _statement(node.lineno))
        if node.test is not None:
            node.test = nodes.And(_step(node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        """Step at every call: macros can call themselves."""
        self.generic_visit(node)
        node.body.insert(0, _statement(node.lineno))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:  # noqa: N802
        """Step whenever a macro calls back."""
        self.generic_visit(node)
        node.body.insert(0, _statement(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        """Make ``a ~ b`` a call that can refuse."""
        self.generic_visit(node)
        return _call("join_text", list(node.nodes), node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:  # noqa: N802
        """Make a comparison a call that can refuse, unless it cannot take long."""
        self.generic_visit(node)
        if len(node.ops) == 1 and _is_cheap(node.expr, node.ops[0]):
            return node
        args = [node.expr]
        for operand in node.ops:
            args += [nodes.Const(operand.op, lineno=node.lineno), operand.expr]
        return _call("compare", args, node.lineno)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802
        """Weigh the keys of a dict, which are hashed."""
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _call("weigh", [node.key], node.lineno)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        """Weigh what is looked up, which is hashed."""
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Const | nodes.Slice):
            node.arg = _call("weigh", [node.arg], node.lineno)
        return node


def _is_cheap(left: nodes.Expr, operand: nodes.Operand) -> bool:
    """Whether one side is written in the template and short, as in most comparisons."""
    if _is_short(left):
        return True
    if operand.op in ("in", "notin"):
        whole = operand.expr
        return isinstance(whole, nodes.List | nodes.Tuple) and all(map(_is_short, whole.items))
    return _is_short(operand.expr)


def _is_short(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) and not (
        isinstance(node.value, str) and len(node.value) > _SHORT_CONSTANT
    )


def _call(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    target = nodes.EnvironmentAttribute(name, lineno=lineno)
    return nodes.Call(target, args, [], None, None, lineno=lineno)


def _step(lineno: int) -> nodes.Call:
    return _call("step", [], lineno)


def _statement(lineno: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_step(lineno), lineno=lineno)
