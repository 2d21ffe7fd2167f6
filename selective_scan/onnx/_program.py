"""Exported programs in which the library's ops are replaced by what they are made of."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from .._checks import fail
from .._ops import ops
from ._operators import Operators
from ._recurrence import NEWEST_OPSET


def decompose(program: ExportedProgram, *, opset: int = NEWEST_OPSET) -> ExportedProgram:
    """Puts what ONNX has in the place of this package's operators.

    :func:`selective_scan.onnx.export` does so. By hand it serves a call of torch.onnx.export with
    arguments that `export` does not have.

    Args:
        program: what torch.export.export made; it stays as it is.
        opset: 27, or an older one. Of an older one the result holds nothing but PyTorch's own
            operators, which torch.onnx.export takes. Of 27 it has those that are new in the domain
            "selective_scan", from which `export` moves them to ONNX's.

    Returns:
        The program that computes the same.

    Raises:
        RuntimeError: see :func:`selective_scan.onnx.export`.

    Example:
        >>> import torch
        >>> from selective_scan import S6
        >>> from selective_scan.onnx import decompose
        >>> program = torch.export.export(S6(d_model=8).eval(), (torch.randn(2, 20, 8),))
        >>> with torch.no_grad():
        ...     made = torch.onnx.export(decompose(program, opset=18), dynamo=True, verbose=False)
    """
    module = copy.deepcopy(program.graph_module)
    forms = Operators(opset).forms()
    for part in [*module.modules()]:
        if isinstance(part, fx.GraphModule):
            _replace_ops(part, forms)
    signature = copy.deepcopy(program.graph_signature)
    # A copied graph may name an input anew, such as one that is called as a function of Python.
    for specs, nodes in (
        (signature.input_specs, module.graph.find_nodes(op="placeholder")),
        (signature.output_specs, module.graph.output_node().args[0]),
    ):
        for spec, node in zip(specs, nodes, strict=True):
            if isinstance(node, fx.Node):
                spec.arg = dataclasses.replace(spec.arg, name=node.name)
    return program._update(module, signature)


def _replace_ops(module: fx.GraphModule, forms: dict[str, Callable]) -> None:
    for node in [*module.graph.nodes]:
        if getattr(node.target, "namespace", None) != ops.name:
            continue
        name = node.target._opname.removesuffix("_traced")
        if name not in forms:
            fail(f"{name} has no form in ONNX")
        _replace(module, node, forms[name])
    module.graph.lint()
    module.recompile()


def _replace(module: fx.GraphModule, node: fx.Node, form: Callable) -> None:
    """Puts the nodes that a form makes of the node's inputs in its place."""
    arguments = _all_arguments(node)
    inputs = [*dict.fromkeys(node.all_input_nodes)]

    def call(*values):
        known = dict(zip(inputs, values, strict=True))
        return form(**fx.map_arg(arguments, known.__getitem__))

    values = [given.meta["val"] for given in inputs]
    with torch.no_grad(), values[0].fake_mode:  # in which also tensors of no input are made
        made = make_fx(call, pre_dispatch=True)(*values)
    made.graph.eliminate_dead_code()
    env = dict(zip(made.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with module.graph.inserting_before(node):
        for new in made.graph.nodes:
            if new.op == "output":
                results = fx.map_arg(new.args[0], env.__getitem__)
            elif new.op != "placeholder":
                copied = module.graph.node_copy(new, env.__getitem__)
                if new.op == "get_attr":
                    copied.target = _adopt(module, getattr(made, new.target))
                copied.meta = node.meta | new.meta  # the exporter wants to know the layer
                env[new] = copied
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    for user in [*node.users]:  # each takes one of several results, and may be of no use
        if user.users:
            user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def _all_arguments(node: fx.Node) -> dict[str, object]:
    """Those of the op, by name."""
    given, arguments = dict(node.kwargs), node.target._schema.arguments
    given |= {argument.name: value for argument, value in zip(arguments, node.args, strict=False)}
    return {argument.name: argument.default_value for argument in arguments} | given


def _adopt(module: fx.GraphModule, part: torch.nn.Module) -> str:
    """Gives the module a part, such as a loop's body, and returns its name."""
    name = next(name for i in itertools.count() if not hasattr(module, name := f"scan_body_{i}"))
    module.add_module(name, part)
    return name
