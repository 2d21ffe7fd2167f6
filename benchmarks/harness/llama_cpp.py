"""A language model with the same weights in llama.cpp: a peer on CPUs, if the packages
llama-cpp-python and gguf are importable."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from harness.checks import relative_l2
from harness.models import LanguageModel

# The number of tokens after the prompt that fit into a context.
_STEPS = 2**14
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}

# llama.cpp's names for the parts of a layer, by Mamba's usual names.
_PARTS = {
    "norm.weight": "attn_norm.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.x_proj.weight": "ssm_x.weight",
    "mixer.dt_proj.weight": "ssm_dt.weight",
    "mixer.dt_proj.bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.out_proj.weight": "ssm_out.weight",
}
# These may be bfloat16; llama.cpp requires everything else in float32.
_MATRICES = ("ssm_in.weight", "ssm_x.weight", "ssm_dt.weight", "ssm_out.weight", "output.weight")


def llama_cpp_calls(
    model: LanguageModel, prompt: Tensor, threads: int
) -> dict[str, Callable[[], object]]:
    """Returns calls that run the prompt, and then a token, through llama.cpp's model of these
    weights; none if llama.cpp is not available.

    Raises:
        RuntimeError: llama.cpp's logits differ from the model's.
    """
    try:
        import gguf  # noqa: F401
        import llama_cpp
    except ImportError:
        return {}
    dtype = model.head.weight.dtype
    if prompt.shape[0] != 1 or dtype not in _TOLERANCE:
        return {}
    tokens = prompt[0].tolist()
    room = len(tokens) + _STEPS
    options = {"n_batch": room, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        _write(model, room, path)
        llama = llama_cpp.Llama(str(path), n_ctx=room, **options)

    def read_prompt() -> object:
        llama.reset()
        llama.eval(tokens)
        return llama_cpp.llama_get_logits(llama.ctx)

    def take_token() -> object:
        if llama.n_tokens + 1 >= room:
            llama.reset()
        llama.eval(tokens[-1:])
        return llama_cpp.llama_get_logits(llama.ctx)

    cache = model.layers.allocate_cache(1)
    for given, call in ((prompt, read_prompt), (prompt[:, -1:], take_token)):
        logits = torch.tensor(call()[: model.head.out_features])
        error = relative_l2(logits, model(given, cache)[0].float())
        if not error <= _TOLERANCE[dtype]:
            raise RuntimeError(f"llama.cpp's logits are off by {error:.1e}")
    return {"prompt, llama.cpp": read_prompt, "token, llama.cpp": take_token}


def _write(model: LanguageModel, room: int, path: Path) -> None:
    """Writes the model as a GGUF file without a vocabulary of words: tokens are numbers."""
    import gguf

    layer = model.layers.layers[0]
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(room)
    writer.add_embedding_length(layer.d_model)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(len(model.layers.layers))
    writer.add_ssm_conv_kernel(layer.d_conv)
    writer.add_ssm_inner_size(layer.d_inner)
    writer.add_ssm_state_size(layer.d_state)
    writer.add_ssm_time_step_rank(layer.dt_rank)
    writer.add_layer_norm_rms_eps(model.layers.norm_f.eps)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(model.head.out_features)

    tensors = {"token_embd.weight": model.embedding.weight, "output.weight": model.head.weight}
    for name, weight in model.layers.to_mamba().items():
        if name == "norm_f.weight":
            tensors["output_norm.weight"] = weight
        else:
            _, place, part = name.split(".", 2)
            tensors[f"blk.{place}.{_PARTS[part]}"] = weight
    for name, weight in tensors.items():
        if name.endswith("ssm_a"):
            weight = -weight.float().exp()
        elif name.endswith("ssm_conv1d.weight"):
            weight = weight.squeeze(1)
        if name.endswith(_MATRICES) and weight.dtype == torch.bfloat16:
            words = weight.detach().contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, words, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, weight.detach().float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
