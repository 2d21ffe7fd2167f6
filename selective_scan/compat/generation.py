"""Generates text from a prompt, with the signatures of mamba_ssm's generation module."""

from __future__ import annotations

import numbers
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, overload

import torch
from torch import Tensor, nn

from .._checks import INTEGER
from .._module_arguments import check_count, check_positive, refuse
from .._wider_states import NotCopied
from ._called import what_is_called
from .sampling import modify_logit_for_repetition_penalty, sample


@dataclass
class InferenceParams:
    """The progress of a generation, and the layers' states.

    Attributes:
        max_seqlen: the maximum length of sequences.
        max_batch_size: number of sequences.
        seqlen_offset: the number of steps that the states have seen.
        batch_size_offset: 0.
        key_value_memory_dict: the layers' states by layer_idx.
        lengths_per_sample: for attention; None.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Restarts with new sequences. The states are kept until the layers overwrite them by those
        of a prompt; before a prompt of another number of sequences, clear `key_value_memory_dict`.
        """
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


class Streamer(Protocol):
    """A receiver of tokens as they are generated, such as transformers' ``TextStreamer``."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


class GenerationOutput(NamedTuple):
    """The result of :func:`decode`.

    Attributes:
        sequences: the prompts and the new tokens, (batch, length).
        scores: for each new token, the logits before the repetition penalty, (batch, vocab_size);
            None if they were not requested.
    """

    sequences: Tensor
    scores: tuple[Tensor, ...] | None


@dataclass
class DecoderOnlyOutput:
    """A mutable :class:`GenerationOutput`, for code with its own generation loop."""

    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None


@torch.inference_mode()
def decode(
    input_ids: Tensor,
    model: nn.Module,
    max_length: int,
    top_k: int = 1,
    top_p: float = 0.0,
    min_p: float = 0.0,
    temperature: float = 1.0,
    repetition_penalty: float = 1.0,
    eos_token_id: int | None = None,
    teacher_outputs: Tensor | None = None,
    vocab_size: int | None = None,
    cg: bool = False,
    enable_timing: bool = False,
    output_scores: bool = False,
    streamer: Streamer | None = None,
) -> GenerationOutput:
    """Generates tokens until sequences have `max_length` tokens, with one call of the model for the
    prompt and one for each further token.

    Args:
        input_ids: the prompts, (batch, seqlen), all of the same length.
        model: called as ``model(input_ids, position_ids=, inference_params=, num_last_tokens=1)``.
        max_length: length of prompt and new tokens, an integer; at least one token is generated.
        top_k: see :func:`sample`; likewise top_p, min_p and temperature.
        repetition_penalty: above 1, makes the tokens of the prompt and previous ones less likely.
        eos_token_id: the token that ends a sequence. Generation stops once it is the newest token
            of all rows. A row that had it earlier continues; cut off its tokens after it.
        teacher_outputs: (batch, length), tokens that replace the model's at their positions, which
            count from the prompt's first token.
        vocab_size: the number of tokens, if the logits are padded to more.
        cg: whether on a CUDA device the call for a token is a single launch of a CUDA graph. The
            model keeps it for further use in its attribute `_decoding_cache`, see
            :func:`update_graph_cache`. Hooks and other Python code run during the capture only, not
            for each token. On a CPU, cg has no effect.
        enable_timing: whether to print the time for prompt and tokens together.
        output_scores: whether to keep the logits.
        streamer: receives the prompt and every new token, (batch, 1), on the CPU, and the end.

    Returns:
        A named tuple of sequences and scores.

    Raises:
        ValueError: an argument is out of range or has a wrong type.

    Example:
        >>> import torch
        >>> from selective_scan.compat.config_mamba import MambaConfig
        >>> from selective_scan.compat.generation import decode
        >>> from selective_scan.compat.mixer_seq_simple import MambaLMHeadModel
        >>> model = MambaLMHeadModel(MambaConfig(d_model=16, n_layer=2, vocab_size=100))
        >>> decode(torch.randint(100, (2, 10)), model, 15, top_k=5).sequences.shape
        torch.Size([2, 15])
    """
    _check_tokens("input_ids", input_ids)
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        refuse("input_ids", "(batch, seqlen) with a token at least", tuple(input_ids.shape))
    batch, prompt = input_ids.shape
    check_count("max_length", max_length, minimum=0)
    check_positive("repetition_penalty", repetition_penalty)
    if vocab_size is not None:
        check_count("vocab_size", vocab_size, " or None")
    if not isinstance(eos_token_id, numbers.Integral | Tensor | None):
        refuse("eos_token_id", "an integer or None", eos_token_id)
    taught = 0
    if teacher_outputs is not None:
        _check_tokens("teacher_outputs", teacher_outputs)
        if teacher_outputs.dim() != 2 or teacher_outputs.shape[0] != batch:
            got = tuple(teacher_outputs.shape)
            refuse("teacher_outputs", f"(batch, length) = ({batch}, *)", got)
        taught = teacher_outputs.shape[1]
    length = max(max_length, prompt + 1)
    start = _now(input_ids.device) if enable_timing else 0.0

    cache = None
    if cg and input_ids.is_cuda:
        cache = getattr(model, "_decoding_cache", None)
        cache = update_graph_cache(model, cache, batch, prompt, length)
        model._decoding_cache = cache
        params = cache.inference_params
        params.reset(length, batch)
    else:
        params = InferenceParams(max_seqlen=length, max_batch_size=batch)

    # Tensors created in torch.inference_mode could not be trained on outside of it.
    with torch.inference_mode(False):
        sequences = input_ids.new_empty(batch, length)
    sequences[:, :prompt] = input_ids
    scores: list[Tensor] = []
    if streamer is not None:
        streamer.put(input_ids.cpu())
    newest, end = input_ids, prompt
    while end < length:
        offset = params.seqlen_offset
        if cache is not None and offset > 0:
            logits = cache.run(newest, offset, offset)
        else:
            logits = _logits_of_last(model, newest, params)
        logits = logits[:, -1, :vocab_size]
        params.seqlen_offset = end
        if output_scores:
            scores.append(logits)
        if end < taught:
            token = teacher_outputs[:, end]
        else:
            if repetition_penalty != 1:
                logits = modify_logit_for_repetition_penalty(
                    logits.clone(), sequences[:, :end], repetition_penalty
                )
            token = sample(logits, top_k, top_p, min_p, temperature)
        sequences[:, end] = token
        newest = sequences[:, end : end + 1]
        end += 1
        if streamer is not None:
            streamer.put(newest.cpu())
        if eos_token_id is not None and (newest == eos_token_id).all():
            break
    if streamer is not None:
        streamer.end()
    if enable_timing:
        time_taken = _now(input_ids.device) - start
        print(f"Prompt processing + decoding time: {1000 * time_taken:.0f}ms")
    return GenerationOutput(sequences[:, :end], tuple(scores) if output_scores else None)


def _check_tokens(name: str, tokens: object) -> None:
    if not isinstance(tokens, Tensor):
        refuse(name, "a Tensor", tokens)
    if tokens.dtype not in INTEGER:
        refuse(name, "of dtype int32 or int64", tokens.dtype)


def _logits_of_last(model: nn.Module, tokens: Tensor, params: InferenceParams) -> Tensor:
    """Calls the model with tokens, (batch, seqlen), for the logits of the last one, (batch, 1,
    vocab_size)."""
    position_ids = None
    if params.seqlen_offset > 0:
        position_ids = torch.full_like(tokens, params.seqlen_offset, dtype=torch.long)
    return model(
        tokens, position_ids=position_ids, inference_params=params, num_last_tokens=1
    ).logits


def _now(device: torch.device) -> float:
    """Returns the time in seconds once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class GenerationMixin:
    """Adds `generate` to a model. It calls the model as :func:`decode` describes, and for CUDA
    graphs also its `allocate_inference_cache`."""

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[int, tuple[Tensor, ...]]:
        """Returns the layers' states before the first step, by layer_idx."""
        raise NotImplementedError(
            f"selective_scan: {type(self).__name__} must have allocate_inference_cache for cg=True"
        )

    @overload
    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        min_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: Literal[False] = False,
        output_scores: bool = False,
        *,
        repetition_penalty: float = 1.0,
        eos_token_id: int | None = None,
        teacher_outputs: Tensor | None = None,
        vocab_size: int | None = None,
        cg: bool = False,
        enable_timing: bool = False,
        streamer: Streamer | None = None,
    ) -> Tensor: ...

    @overload
    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        min_p: float = 0.0,
        temperature: float = 1.0,
        *,
        return_dict_in_generate: Literal[True],
        output_scores: bool = False,
        repetition_penalty: float = 1.0,
        eos_token_id: int | None = None,
        teacher_outputs: Tensor | None = None,
        vocab_size: int | None = None,
        cg: bool = False,
        enable_timing: bool = False,
        streamer: Streamer | None = None,
    ) -> GenerationOutput: ...

    @overload
    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        min_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        *,
        repetition_penalty: float = 1.0,
        eos_token_id: int | None = None,
        teacher_outputs: Tensor | None = None,
        vocab_size: int | None = None,
        cg: bool = False,
        enable_timing: bool = False,
        streamer: Streamer | None = None,
    ) -> Tensor | GenerationOutput: ...

    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        min_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        *,
        repetition_penalty: float = 1.0,
        eos_token_id: int | None = None,
        teacher_outputs: Tensor | None = None,
        vocab_size: int | None = None,
        cg: bool = False,
        enable_timing: bool = False,
        streamer: Streamer | None = None,
    ) -> Tensor | GenerationOutput:
        """Generates tokens from prompts; see :func:`decode` for the other arguments.

        Args:
            return_dict_in_generate: whether to return sequences and scores.

        Returns:
            The prompts and the new tokens, (batch, length); with `return_dict_in_generate` a named
            tuple of sequences and scores.

        Raises:
            ValueError: an argument is out of range.
            NotImplementedError: `cg` is True on a CUDA device, and the model lacks
                `allocate_inference_cache`.

        Example:
            >>> import torch
            >>> from selective_scan.compat.config_mamba import MambaConfig
            >>> from selective_scan.compat.mixer_seq_simple import MambaLMHeadModel
            >>> model = MambaLMHeadModel(MambaConfig(d_model=16, n_layer=2, vocab_size=100))
            >>> model.generate(torch.randint(100, (2, 10)), max_length=15).shape
            torch.Size([2, 15])
        """
        sampling = (top_k, top_p, min_p, temperature, repetition_penalty)
        output = decode(
            *(input_ids, self, max_length, *sampling, eos_token_id, teacher_outputs, vocab_size),
            *(cg, enable_timing, output_scores, streamer),
        )
        return output if return_dict_in_generate else output.sequences


# --- CUDA graphs ----------------------------------------------------------------------------------


@dataclass
class DecodingCache(NotCopied):
    """CUDA graphs of a model's decoding calls, and the states that they change.

    They are not copied or pickled, since a CUDA graph belongs to its process and its tensors.

    Attributes:
        key: what the graphs were captured for; if it differs, they are captured again.
        inference_params: the parameters with the states.
        graphs: the graphs by number of tokens of a call, each with its input and output.
        max_seqlen: the maximum length of sequences for which there are states.
    """

    key: tuple[object, ...]
    inference_params: InferenceParams
    graphs: dict[int, _Graph] = field(default_factory=dict)
    max_seqlen: int = 0

    def run(self, input_ids: Tensor, position_ids: Tensor | int, seqlen: int) -> Tensor:
        """Returns the logits for (batch, number) tokens at these positions, or all at one. seqlen,
        the number of tokens before these, has no effect, since the states imply it."""
        return self.graphs[input_ids.shape[1]].run(input_ids, position_ids)


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    position_ids: Tensor
    logits: Tensor

    def run(self, tokens: Tensor, position_ids: Tensor | int) -> Tensor:
        self.tokens.copy_(tokens)
        if isinstance(position_ids, Tensor):
            self.position_ids.copy_(position_ids)
        else:
            self.position_ids.fill_(position_ids)
        with torch.cuda.device(self.tokens.device):
            self.graph.replay()
        return self.logits.clone()


@torch.inference_mode()
def update_graph_cache(
    model: nn.Module,
    cache: DecodingCache | None,
    batch_size: int,
    seqlen_og: int,
    max_seqlen: int,
    decoding_seqlens: Sequence[int] = (1,),
    dtype: torch.dtype | None = None,
    n_warmups: int = 2,
) -> DecodingCache:
    """Returns the CUDA graphs of a model's decoding calls: `cache` if it fits, else new ones.

    The graphs are captured again for other sizes or dtypes, for longer sequences, for weights at
    other addresses, for another module or hook, and if an attribute of a module has changed: a
    number, a flag, a function, or the contents of lists and dicts. Changes inside any other object,
    such as a configuration, are not detected; set the model's `_decoding_cache` to None after them.

    Args:
        model: a model on a CUDA device.
        cache: the result of an earlier call, or None.
        batch_size: number of sequences.
        seqlen_og: length of the prompt.
        max_seqlen: the maximum length of sequences.
        decoding_seqlens: the numbers of tokens of a call to capture graphs for.
        dtype: the states' dtype; by default that of the weights.
        n_warmups: how often a call is run before it is captured.

    Returns:
        The graphs, with their own states.

    Raises:
        NotImplementedError: the model lacks `allocate_inference_cache`.

    Example:
        >>> import torch
        >>> from selective_scan.compat.config_mamba import MambaConfig
        >>> from selective_scan.compat.generation import update_graph_cache
        >>> from selective_scan.compat.mixer_seq_simple import MambaLMHeadModel
        >>> model = MambaLMHeadModel(MambaConfig(d_model=16, n_layer=2, vocab_size=100))
        >>> if torch.cuda.is_available():
        ...     cache = update_graph_cache(model.cuda(), None, 2, seqlen_og=10, max_seqlen=15)
        ...     tokens = torch.zeros(2, 1, dtype=torch.long, device="cuda")
        ...     logits = cache.run(tokens, torch.full_like(tokens, 10), 10)
    """
    is_autocast = torch.is_autocast_enabled("cuda")
    autocast_dtype = torch.get_autocast_dtype("cuda") if is_autocast else None
    sizes = (batch_size, tuple(decoding_seqlens), dtype, autocast_dtype)
    # The states of attention layers have a position for every step, so max_seqlen matters.
    is_long_enough = cache is not None and max_seqlen <= cache.max_seqlen
    if is_long_enough and cache.key == (*sizes, *what_is_called(model)):
        return cache
    device = next(model.parameters()).device
    states = model.allocate_inference_cache(batch_size, max_seqlen, dtype)
    params = InferenceParams(max_seqlen, batch_size, seqlen_og, key_value_memory_dict=states)
    cache = DecodingCache((), params, max_seqlen=max_seqlen)
    # Autocast caches no weights here: they would be freed while the graph still reads them.
    autocast = torch.autocast("cuda", autocast_dtype, enabled=is_autocast, cache_enabled=False)
    with torch.cuda.device(device), autocast:
        for seqlen in decoding_seqlens:
            cache.graphs[seqlen] = _capture(model, params, (batch_size, seqlen), device, n_warmups)
    cache.key = (*sizes, *what_is_called(model))  # the first calls may have changed the model
    params.seqlen_offset = 0  # a prompt comes next
    return cache


def _capture(
    model: nn.Module,
    params: InferenceParams,
    shape: tuple[int, int],
    device: torch.device,
    n_warmups: int,
) -> _Graph:
    tokens, position_ids = torch.zeros(2, *shape, dtype=torch.long, device=device)
    # An offset of 0 would make the call that of a prompt.
    params.seqlen_offset = max(1, params.seqlen_offset)

    def run() -> Tensor:
        return model(
            tokens,
            position_ids=position_ids,
            inference_params=params,
            num_last_tokens=shape[1],
        ).logits

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(n_warmups):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()
    return _Graph(graph, tokens, position_ids, logits)
