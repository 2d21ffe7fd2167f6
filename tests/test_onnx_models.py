"""Models in ONNX: results of onnxruntime against PyTorch, for any batch and length."""

import pytest
import torch
from torch import nn

import published_calls
from exported import Program, assert_close
from opchecks import needs_pytorch
from problem import METHODS
from selective_scan import S6, MambaMixer, MixerCache, S6Cache, mamba_inner_fn, selective_scan_fn
from selective_scan.compat.mamba_simple import Mamba

D_MODEL = 16
LENGTH, BATCH = torch.export.Dim("length"), torch.export.Dim("batch")
OF_ROWS, OF_STATES = {0: BATCH, 1: LENGTH}, {0: BATCH}
BOUND = 1e-4


def check(model, examples, path, opset=27, dynamic=(OF_ROWS,)):
    """Exports a model by the first example, and compares its results for all of them."""
    program = Program(model.eval(), examples[0], path, opset=opset, dynamic=dynamic)
    with torch.no_grad():
        for example in examples:
            assert_close(program(*example), model(*example), BOUND)
    return program


def rows(*sizes):
    return [(torch.randn(*size, D_MODEL),) for size in sizes]


ROWS = ((2, 9), (3, 1), (1, 40))


def s6(**options):
    return S6(D_MODEL, d_state=4, depth=1, **options)


def mixers():
    return [MambaMixer(D_MODEL, d_state=4, bidirectional=it) for it in (False, True)]


@pytest.mark.slow
def test_layers_of_one_size(tmp_path):
    """All layers are in one program, since the fixed cost of an export is high."""
    layers = [s6(discretization_method=it) for it in METHODS[1:]]
    layers += [Mamba(D_MODEL, d_state=4, bimamba_type=it) for it in ("none", "v2")]
    check(nn.Sequential(*layers, *mixers()), rows(ROWS[0]), tmp_path / "model.onnx", dynamic=None)


@pytest.mark.slow
def test_double_precision(tmp_path):
    model, x = s6(dtype=torch.float64), torch.randn(2, 9, D_MODEL, dtype=torch.float64)
    program = Program(model.eval(), (x,), tmp_path / "model.onnx", opset=18)
    assert_close(program(x), model(x).detach(), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [27, 18])
def test_both_directions_of_any_size(opset, tmp_path):
    """A layer of both directions takes PyTorch several times as long to export."""
    check(mixers()[1], rows(*ROWS), tmp_path / "model.onnx", opset)


@pytest.mark.slow
@needs_pytorch("2.13", "turns of any length")
def test_states_that_rotate(tmp_path):
    model = s6(dt_min=0.2, dt_max=1.0, rotary=True)
    check(model, rows(*ROWS), tmp_path / "model.onnx")


@pytest.mark.slow
def test_the_trapezoid(tmp_path):
    model = MambaMixer(D_MODEL, d_state=4, discretization_method="trapezoid")
    check(model, rows(*ROWS), tmp_path / "model.onnx")


class Both(nn.Module):
    """Applies two models to the same images."""

    def __init__(self, one, other):
        super().__init__()
        self.one, self.other = one, other

    def forward(self, image):
        return self.one(image), self.other(image)


def images(*sizes):
    return [(torch.randn(n, published_calls.DIM, height, 3),) for n, height in sizes]


@pytest.mark.slow
def test_vision_of_one_size(tmp_path):
    """Vim's and VMamba's blocks are called as published."""
    model = Both(published_calls.Vim(mamba_inner_fn), published_calls.VMamba(selective_scan_fn))
    check(model, images((2, 4)), tmp_path / "model.onnx", dynamic=None)


@pytest.mark.slow
def test_vision_of_any_number_and_height(tmp_path):
    model = published_calls.MambaVision(selective_scan_fn)
    dynamic = ({0: BATCH, 2: torch.export.Dim("height", max=4096)},)
    check(model, images((2, 4), (3, 5)), tmp_path / "model.onnx", dynamic=dynamic)


@pytest.mark.slow
def test_transformers_model_by_our_kernels(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    from selective_scan.integrations.transformers import enable

    class Logits(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(tokens, use_cache=False).logits

    sizes = {"hidden_size": D_MODEL, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 30}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    tokens = [(torch.randint(30, size),) for size in ROWS]
    with enable():
        program = check(Logits(model), tokens, tmp_path / "model.onnx")
    assert program.operators["LinearAttention"] == 1


# --- with states ----------------------------------------------------------------------------------


class Continued(nn.Module):
    """An S6 that continues from states, which are inputs and outputs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, *states):
        states = [state.clone() for state in states]
        layers = zip(*[iter(states)] * 2, strict=True)
        out = self.model(x, cache=S6Cache(tuple(MixerCache(*layer) for layer in layers)))
        return out, *states


def continued(depth, *sizes):
    """Returns an S6 that continues from states, and calls with these numbers of rows and steps."""
    model = S6(D_MODEL, d_state=4, depth=depth)

    def call(batch, seqlen):
        cache = model.allocate_cache(batch)
        states = [state.normal_() for layer in cache.layers for state in layer._tensors()]
        return (torch.randn(batch, seqlen, D_MODEL), *states)

    return Continued(model), [call(*size) for size in sizes]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "opset"), [(None, 27), (None, 18), (1, 27)])
def test_s6_goes_on_from_its_cache(steps, opset, tmp_path):
    """S6 continues by any number of steps, or by one, which is another operator in PyTorch."""
    of_rows = OF_ROWS if steps is None else OF_STATES
    sizes = ROWS if steps is None else [(2, 1), (3, 1), (1, 1)]
    check(*continued(1, *sizes), tmp_path / "any.onnx", opset, (of_rows, (OF_STATES,) * 2))
    if opset == 27:  # fixed sizes, too, for which an export of several layers takes less time
        check(*continued(2, (2, steps or 9)), tmp_path / "fixed.onnx", opset, None)
