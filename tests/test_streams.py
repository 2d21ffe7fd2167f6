"""CUDA only: other streams, graph capture, other devices than the current one."""

import concurrent.futures
import copy

import pytest
import torch

import test_packed as packed
from accuracy import assert_same_bits
from graphs import capture
from problem import Case, check_results, detached, inputs_on, make, op_arguments, options_on, run
from selective_scan import S6, selective_scan_fn
from selective_scan.compat.config_mamba import MambaConfig
from selective_scan.compat.mixer_seq_simple import MambaLMHeadModel

pytestmark = pytest.mark.cuda

CASES = [
    Case(batch=2, dim=64, seqlen=300, dstate=16),
    Case(batch=2, dim=64, seqlen=300, dstate=16, complex=True, method="foh", B="constant"),
    Case(dim=64, seqlen=300, dtype=torch.bfloat16, layout="channel_last", method="bilinear"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_side_stream(case, cuda_device):
    """The kernels wait for work queued earlier on the stream, and for nothing else."""
    expected = run(case, cuda_device)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # delays the inputs
        results = run(case, cuda_device)
    stream.synchronize()
    assert_same_bits(expected, results)


def forward_and_backward_ops(case, inputs, cotangents):
    ops = torch.ops.selective_scan
    arguments = op_arguments(case, inputs)
    out, last_state, states = ops.selective_scan_fwd(*arguments, True)
    gradients = ops.selective_scan_bwd(
        cotangents["out"], cotangents["last_state"], *arguments, states
    )
    return out, last_state, *gradients


@pytest.mark.parametrize("case", CASES, ids=str)
def test_graph_capture_and_replay_with_new_data(case, cuda_device):
    inputs = detached(inputs_on(case, cuda_device))
    cotangents = {name: value.cuda() for name, value in make(case).cotangents.items()}
    graph, captured = capture(lambda: forward_and_backward_ops(case, inputs, cotangents))

    for scale in (1.0, 0.5, -2.0):
        inputs["u"].mul_(scale)
        inputs["C"].add_(scale)
        cotangents["out"].mul_(scale)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(captured, forward_and_backward_ops(case, inputs, cotangents))


def test_a_captured_training_step(cuda_device):
    """Autograd works through selective_scan_fn inside a graph."""
    case = CASES[0]
    inputs = inputs_on(case, cuda_device)
    leaves = list(inputs.values())
    options = make(case).options

    def step():
        out = selective_scan_fn(**inputs, **options)
        return torch.autograd.grad(out.square().sum(), leaves)

    graph, captured = capture(step)
    with torch.no_grad():
        inputs["u"].add_(0.25)
    graph.replay()
    assert_same_bits(captured, step())


def language_model():
    return MambaLMHeadModel(MambaConfig(d_model=32, n_layer=2, vocab_size=40))


@pytest.mark.parametrize(
    ("make_model", "dtype"),
    [
        (lambda: S6(32, 4, depth=2), None),
        (lambda: S6(32, 4, depth=2), torch.bfloat16),
        (lambda: S6(32, 4, depth=2, bidirectional=True, discretization_method="foh"), None),
        (language_model, torch.bfloat16),
    ],
    ids=["layers", "autocast", "both directions", "language model"],
)
def test_a_graphed_model_trains_like_the_model(make_model, dtype, cuda_device):
    """torch.cuda.make_graphed_callables replaces a model's passes by graphs."""
    model = make_model().to(cuda_device)
    graphed = copy.deepcopy(model)
    if isinstance(model, MambaLMHeadModel):
        inputs = torch.randint(40, (4, 2, 37), device=cuda_device)
    else:
        inputs = torch.randn(4, 2, 37, 32, device=cuda_device)

    def autocast():
        return torch.autocast("cuda", dtype, enabled=dtype is not None, cache_enabled=False)

    with autocast():
        graphed = torch.cuda.make_graphed_callables(graphed, (inputs[0],))
    outputs = []
    for it in (model, graphed):
        optimizer = torch.optim.SGD(it.parameters(), lr=0.1)
        for given in inputs[1:]:
            with autocast():
                out = it(given)
            out = getattr(out, "logits", out)
            optimizer.zero_grad()
            out.float().square().mean().backward()
            optimizer.step()
        outputs.append({"out": out.detach(), **dict(it.named_parameters())})
    assert_same_bits(*outputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_device_that_is_not_current(case, cuda_device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with torch.cuda.device(0):
        actual = run(case, "cuda:1")
        assert torch.cuda.current_device() == 0
    assert all(value.device == torch.device("cuda:1") for value in actual.values())
    check_results(case, actual, "cuda")


@pytest.mark.parametrize("case", [CASES[0], packed.BASE], ids=str)
def test_it_does_not_synchronize(case, cuda_device):
    """A synchronizing call would raise an error in this mode."""
    inputs, options = inputs_on(case, cuda_device), options_on(case, cuda_device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        selective_scan_fn(**inputs, **options).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_threads_that_launch_one_kernel(cuda_device):
    """Blocks of these two calls take different amounts of shared memory. What one thread asks for
    must not be what the other's launch gets."""
    cases = [Case(batch=1, dim=dim, seqlen=64, dtype=torch.bfloat16) for dim in (512, 1536)]

    def launch_many(case: Case) -> dict[str, torch.Tensor]:
        arguments = op_arguments(case, inputs_on(case, cuda_device))
        for _ in range(3000):
            out = torch.ops.selective_scan.selective_scan_fwd(*arguments, False)[0]
        return {"out": out}

    expected = [run(case, cuda_device)["out"] for case in cases]
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as threads:
        results = list(threads.map(launch_many, cases))
    for wanted, result in zip(expected, results, strict=True):
        assert_same_bits({"out": wanted}, result)
