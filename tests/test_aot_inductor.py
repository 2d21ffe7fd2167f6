"""AOTInductor's packages: another process gets the results of eager calls from them."""

import pytest
import torch
from torch import nn

import operator_calls
import programs
from gpu_kernels import has_step
from selective_scan import S6, MambaMixer

pytestmark = pytest.mark.slow

# Precompiled headers take as long to build as one package, so they only pay for many.
SOON_COMPILED = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}
LOAD = """
import sys, torch, torch._inductor.codecache, selective_scan
package, given, made = sys.argv[1:]
run = torch._inductor.aoti_load_package(package)
calls = torch.load(given)
torch.save([(run(*arguments), arguments) for arguments in calls], made)
"""


class Several(nn.Module):
    """Calls several functions, each with its own list of arguments."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def forward(self, *arguments):
        return [call(*given) for call, given in zip(self.functions, arguments, strict=True)]


def run_elsewhere(program, calls, folder):
    """Returns each call's results from a process that loads the package, and its arguments then."""
    package, given, made = (str(folder / name) for name in ("model.pt2", "given.pt", "made.pt"))
    torch._inductor.aoti_compile_and_package(
        program, package_path=package, inductor_configs=SOON_COMPILED
    )
    torch.save(calls, given)
    (script := folder / "load.py").write_text(LOAD)
    done = programs.run(script, package, given, made)
    assert done.returncode == 0, done.stderr
    return torch.load(made)


def check(module, calls, folder, **options):
    program = torch.export.export(module, calls[0], **options)
    actual = run_elsewhere(program, calls, folder)
    with torch.no_grad():
        expected = [(module(*arguments), arguments) for arguments in calls]
    # Compiled products are summed in another order.
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_every_operator(device, tmp_path):
    names = (*operator_calls.DIFFERENTIABLE, *operator_calls.IN_PLACE)
    there = [name for name in names if name != "step" or device == "cpu" or has_step()]
    made = [operator_calls.make(name, device) for name in there]
    functions, arguments = zip(*made, strict=True)
    check(Several(functions), [arguments], tmp_path)


def test_models(device, tmp_path):
    """Packages work for any length, also if compiled with parameters that require a gradient."""
    options = {"d_state": 4, "device": device}
    model = nn.Sequential(MambaMixer(8, bidirectional=True, **options), S6(8, **options))
    calls = [(torch.randn(2, seqlen, 8, device=device),) for seqlen in (40, 2, 133)]
    length = torch.export.Dim("length", min=2, max=4096)
    check(model, calls, tmp_path, dynamic_shapes=({1: length},))
