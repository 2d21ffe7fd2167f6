"""Replaces the library's ops in exported programs by compositions of other operators."""

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
    """Replaces this package's operators in a program by ones that ONNX has.

    :func:`selective_scan.onnx.export` calls this function. Call it directly to use arguments of
    torch.onnx.export that `export` does not have.

    Args:
        program: the result of torch.export.export, which is not changed.
        opset: 27, or an older one. For an older one the result contains only PyTorch's own
            operators, which torch.onnx.export supports. For 27 it has the operators new in that
            opset in the domain "selective_scan", from which `export` moves them to ONNX's.

    Returns:
        A program that computes the same.

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
    # A copied graph may rename an input, such as one with the name of a Python function.
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
    """Replaces a node by the nodes into which `form` traces from the node's inputs."""
    arguments = _all_arguments(node)
    inputs = [*dict.fromkeys(node.all_input_nodes)]

    def call(*values):
        known = dict(zip(inputs, values, strict=True))
        return form(**fx.map_arg(arguments, known.__getitem__))

    values = [given.meta["val"] for given in inputs]
    with torch.no_grad(), values[0].fake_mode:  # for tensors that are made from no input, too
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
                copied.meta = node.meta | new.meta  # the exporter needs the layer's name
                env[new] = copied
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    for user in [*node.users]:  # each takes one of several results, possibly without a use
        if user.users:
            user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def _all_arguments(node: fx.Node) -> dict[str, object]:
    """Returns the arguments of the op by name, defaults included."""
    given, arguments = dict(node.kwargs), node.target._schema.arguments
    given |= {argument.name: value for argument, value in zip(arguments, node.args, strict=False)}
    return {argument.name: argument.default_value for argument in arguments} | given


def _adopt(module: fx.GraphModule, part: torch.nn.Module) -> str:
    """Adds a submodule, such as a loop's body, to the module and returns its name."""
    name = next(name for i in itertools.count() if not hasattr(module, name := f"scan_body_{i}"))
    module.add_module(name, part)
    return name
