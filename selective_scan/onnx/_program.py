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
from ._operators import Operators

NAMESPACE = "selective_scan"


def decompose(program: ExportedProgram, *, opset: int) -> ExportedProgram:
    module = copy.deepcopy(program.graph_module)
    forms = Operators(opset).forms()
    for part in [*module.modules()]:
        if isinstance(part, fx.GraphModule):
            _replace_ops(part, forms)
    signature = copy.deepcopy(program.graph_signature)
    for spec, result in zip(signature.output_specs, module.graph.output_node().args[0], strict=True):
        if isinstance(result, fx.Node):
            spec.arg = dataclasses.replace(spec.arg, name=result.name)
    return program._update(module, signature)


def _replace_ops(module: fx.GraphModule, forms: dict[str, Callable]) -> None:
    for node in [*module.graph.nodes]:
        if getattr(node.target, "namespace", None) != NAMESPACE:
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

    with torch.no_grad():
        made = make_fx(call, pre_dispatch=True)(*(value.meta["val"] for value in inputs))
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
    name = next(
        name for i in itertools.count() if not hasattr(module, name := f"scan_body_{i}")
    )
    module.add_module(name, part)
    return name
