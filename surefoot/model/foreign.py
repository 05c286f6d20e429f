"""Networks that `transformers` computes, over our cache, for architectures that have no page here.

transformers lets attention be replaced: what its layers would attend with is called with turned queries and keys of
this step's tokens, and hands them to `Attend`, as a page of ours would. Linear layers are ours, too, so that rows do
not depend on their neighbours where torch's would. The network runs once for the tokens of all sequences, each at its
own position; nothing in it may look from one token to another but attention, which is tried out before serving.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.errors import CheckpointError
from surefoot.model.layers import Attend, Attention
from surefoot.ops.linear import make_linear
from surefoot.spec import ModelSpec

_NAME = "surefoot"
"""Of our attention among those of transformers."""
_TRIED = (TypeError, AttributeError, KeyError, ValueError, NotImplementedError, IndexError)
"""What a network that is not made for this raises; running out of memory is none of them."""
log = logging.getLogger(__name__)


class ForeignNetwork:
    """A network of transformers' with its weights; see `model.layers.Network`."""

    def __init__(self, spec: ModelSpec, network: Any, quantization: str) -> None:
        self.spec = spec
        self._network = network.eval()
        self._body = network.base_model
        _replace_linears(network, quantization)
        # What stands between the body and the logits (scales, caps) is the class's own: it runs over a body that hands
        # on what it is given.
        setattr(network, network.base_model_prefix, _HandOn())

    @classmethod
    def load(
        cls,
        folder: Path,
        spec: ModelSpec,
        *,
        device: torch.device,
        dtype: torch.dtype,
        quantization: str = "none",
        dummy: bool = False,
    ) -> ForeignNetwork:
        """Load through transformers and try it out. Raises CheckpointError for a network that cannot be served so."""
        if device.type != "cpu":
            raise CheckpointError(
                f"{spec.architecture} runs through transformers, on the CPU only for now: --device cpu."
            )
        network = cls(spec, _loaded(folder, spec, dtype, dummy=dummy), quantization)
        try:
            network._try_out(dtype)
        except _TRIED as error:
            raise _refused(spec, f"as it raises {error!r}") from error
        return network

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, keep: Tensor | None = None) -> Tensor:
        """Ids and positions [n] → hidden rows [n, hidden] after the last norm, or [k, hidden] of the tokens `keep`."""
        done = self._body(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, surefoot=_Step(attend, self.spec)
        )
        hidden: Tensor = done.last_hidden_state[0]
        return hidden if keep is None else hidden.index_select(0, keep)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Hidden rows [rows, hidden] → [rows, vocabulary], into `out` if given."""
        logits: Tensor = self._network(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits if out is None else out.copy_(logits)

    def _try_out(self, dtype: torch.dtype) -> None:
        """Two tokens: every layer attends once, and without attention neither token knows of the other."""
        called: list[int] = []

        def alone(layer: int, qkv: Tensor, how: Attention) -> Tensor:
            called.append(layer)
            heads = self.spec.num_heads
            return qkv[:, :heads].flatten(1)

        tokens, positions = torch.tensor([1, 2]), torch.tensor([0, 1])
        together = self.forward(tokens, positions, alone)
        if called != list(range(self.spec.num_layers)):
            raise _refused(self.spec, f"as of {self.spec.num_layers} layers those numbered {called} attended")
        apart = torch.cat([self.forward(tokens[at : at + 1], positions[at : at + 1], alone) for at in (0, 1)])
        if (together - apart).abs().max() > 0.02 * apart.abs().max():
            raise _refused(self.spec, "as its tokens meet outside of attention, too")
        shape = tuple(self.logits(together).shape)
        if shape != (2, self.spec.vocab_size):
            raise _refused(self.spec, f"as logits of two rows have shape {shape}")


def _refused(spec: ModelSpec, why: str) -> CheckpointError:
    return CheckpointError(f"{spec.architecture} cannot be served through transformers {why}.")


class _Step:
    """What our attention needs to know of a step; handed through the network's layers as an argument."""

    def __init__(self, attend: Attend, spec: ModelSpec) -> None:
        self.attend = attend
        self.spec = spec


class _HandOn(nn.Module):
    """In the place of a network's body: its output is its input."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


class _Rows(nn.Module):
    """A linear layer of ours in the place of torch's."""

    def __init__(self, weight: Tensor, bias: Tensor | None, quantization: str) -> None:
        super().__init__()
        self.linear = make_linear(weight, bias, quantization=quantization)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def _replace_linears(network: nn.Module, quantization: str) -> None:
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                bias = None if child.bias is None else child.bias.detach()
                setattr(parent, name, _Rows(child.weight.detach(), bias, quantization))


def _loaded(folder: Path, spec: ModelSpec, dtype: torch.dtype, *, dummy: bool) -> Any:
    """transformers' network with its weights, attention replaced. No code of the checkpoint is run."""
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(
            f"{spec.architecture} is not built here, and transformers, which may know it, is not installed: "
            'pip install "surefoot[transformers]".'
        ) from error
    transformers.AttentionInterface.register(_NAME, _attention)
    kind = getattr(transformers, spec.architecture, None)
    if kind is None or not hasattr(kind, "from_pretrained"):
        raise CheckpointError(f"transformers {transformers.__version__} does not know {spec.architecture}.")
    if not getattr(kind, "_supports_attention_backend", False):
        raise _refused(spec, "as it does not let its attention be replaced")
    try:
        if dummy:
            config = kind.config_class.from_pretrained(folder)
            return kind._from_config(config, dtype=dtype, attn_implementation=_NAME)
        return kind.from_pretrained(
            folder, dtype=dtype, attn_implementation=_NAME, local_files_only=True, use_safetensors=True
        )
    except (OSError, *_TRIED) as error:
        raise CheckpointError(f"{folder}: transformers cannot load {spec.architecture}: {error}") from error


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    surefoot: _Step,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [1, heads, n, dim], twice [1, kv_heads, n, dim] → [1, n, heads, dim].

    Raises CheckpointError for what our attention does not compute.
    """
    spec, layer = surefoot.spec, int(getattr(module, "layer_idx"))  # noqa: B009 - modules have attributes of any type
    strange = [name for name in ("s_aux", "position_bias", "alibi", "block_mask") if more.get(name) is not None]
    if attention_mask is not None or more.get("is_causal") is False:
        strange.append("a mask of its own")
    if strange:
        raise _refused(spec, f"as layer {layer} attends with {', '.join(strange)}")
    asked = (query.shape[1], key.shape[1], query.shape[3], value.shape[3], sliding_window)
    planned = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim, spec.window(layer))
    if asked != planned:
        raise _refused(
            spec,
            f"as layer {layer} attends with {asked} heads, key-value heads, dimensions of keys and of values, and "
            f"window; config.json says {planned}",
        )
    how = Attention(
        turns=None,
        q_norm=None,
        k_norm=None,
        eps=0.0,
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    qkv = torch.cat((query[0], key[0], value[0])).transpose(0, 1).contiguous()
    return surefoot.attend(layer, qkv, how).view(1, len(qkv), spec.num_heads, -1), None
