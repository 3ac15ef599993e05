#!/usr/bin/env python3
"""Quantised modules written, and read back, by the packages that define the formats.

    pip install torch transformers compressed-tensors auto-round autoawq safetensors numpy
    python generate.py

Each folder holds one format:

    config.json            `quantization_config` as the format's writers have it, and sizes for the reader
    model.safetensors      the tensors of two linear layers
    expected.safetensors   what they stand for: "<module>.weight", f32 [out, in]

The weights are random numbers. Scales are cast to f32 before the reference multiplies with them, so that what is
expected is exact. What each format was packed and unpacked by is said in README.md.
"""
import importlib.util
import json
import shutil
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
# Module -> [out, in].
MODULES = {"model.layers.0.mlp.up_proj": (96, 64), "model.layers.0.mlp.down_proj": (64, 96)}


def open_package(name, *parts):
    """Makes parts of a package importable without its __init__, which needs an old Transformers."""
    paths = list(importlib.util.find_spec(name).submodule_search_locations)
    for part in ("",) + parts:
        full = f"{name}.{part}" if part else name
        module = types.ModuleType(full)
        module.__path__ = [f"{paths[0]}/{part.replace('.', '/')}"]
        sys.modules[full] = module


open_package("awq", "modules", "modules.linear", "utils")
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm
from auto_round_extension.torch.qlinear_torch import QuantLinear as GptqV2
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as GptqV1
from compressed_tensors.compressors import (FloatQuantizationCompressor, IntQuantizationCompressor, NaiveQuantizationCompressor,
                                            PackedQuantizationCompressor)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from transformers.integrations.finegrained_fp8 import Fp8Dequantize


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in MODULES.items()}


def write(name, quantization, tensors, expected):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    save_file({f"{key}.weight": value.to(torch.float32).contiguous() for key, value in expected.items()}, folder / "expected.safetensors")


def ranges(weight, group, bits, symmetric):
    """Scales and zeros, both [out, groups], of groups of inputs (the last may be partial)."""
    scales, zeros = [], []
    for part in weight.split(group, dim=1):
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scale = torch.maximum(-low, high) / (2 ** (bits - 1) - 1)
            zero = torch.full_like(scale, 2 ** (bits - 1))
        else:
            scale = (high - low) / (2**bits - 1)
            # v1 cannot store a zero of 0.
            zero = torch.round(-low / scale).clamp(1, 2**bits - 1)
        scales.append(scale.half().float())
        zeros.append(zero)
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def linear(weight):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    return layer


def awq(name, group, seed, quantization=None):
    tensors, expected = {}, {}
    for module, weight in weights(seed).items():
        size = weight.shape[1] if group == -1 else group
        scales, zeros = ranges(weight, size, 4, False)
        each = lambda x: x.repeat_interleave(size, 1)
        # The packer does not clamp.
        codes = torch.clamp(torch.round(weight / each(scales)) + each(zeros), 0, 15)
        exact = (codes - each(zeros)) * each(scales)
        packed = WQLinear_GEMM.from_linear(linear(exact), 4, size, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
        for key in ["qweight", "qzeros", "scales"]:
            tensors[f"{module}.{key}"] = getattr(packed, key)
        expected[module] = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, size).t()
        assert torch.equal(expected[module], exact), name
    usual = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    write(name, quantization or usual, tensors, expected)


def gptq_config(bits, group, symmetric, desc_act=False, **more):
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": desc_act, "lm_head": False, "true_sequential": True,
            **more}


def pack_with(writer, module, weight, bits, group, symmetric, tensors, expected):
    """Adds the tensors of a module as auto-round packs it, and what it makes of them."""
    out, inputs = weight.shape
    scales, zeros = ranges(weight, inputs if group == -1 else group, bits, symmetric)
    layer = writer(bits, group, inputs, out, bias=False, g_idx=True)
    layer.device = torch.device("cpu")
    layer.pack(linear(weight), scales, int(zeros[0, 0]) if symmetric else zeros, None, device="cpu")
    for key in ["qweight", "qzeros", "scales", "g_idx"]:
        tensors[f"{module}.{key}"] = getattr(layer, key)
    layer.scales = layer.scales.float()
    layer.dequant_dtype = torch.int16
    # With it the reference reads square matrices alone.
    del layer.g_idx
    # Each product with a row of the identity is one weight.
    expected[module] = layer(torch.eye(inputs)).t()


def auto_round_config(group, symmetric, packing, **more):
    """As auto-round 0.16.1 writes it, of models that it has quantised."""
    return {"autoround_version": "0.16.1", "bits": 4, "block_name_to_quantize": "model.layers", "data_type": "int", "enable_quanted_input": False,
            **more, "group_size": group, "packing_format": packing, "quant_method": "auto-round", "sym": symmetric}


def auto_round(name, writer, group, symmetric, packing, seed):
    """The second module in 8 bits, which are always symmetric."""
    tensors, expected = {}, {}
    (_, last) = MODULES
    for module, weight in weights(seed).items():
        bits, is_symmetric = (8, True) if module == last else (4, symmetric)
        pack_with(writer, module, weight, bits, group, is_symmetric, tensors, expected)
        # It writes none in these formats.
        del tensors[f"{module}.g_idx"]
    extra = {last: {"bits": 8} if symmetric else {"bits": 8, "sym": True}}
    write(name, auto_round_config(group, symmetric, packing, extra_config=extra), tensors, expected)


def gptq(name, writer, bits, group, symmetric, seed, **more):
    tensors, expected = {}, {}
    for module, weight in weights(seed).items():
        pack_with(writer, module, weight, bits, group, symmetric, tensors, expected)
    write(name, gptq_config(bits, group, symmetric, **more), tensors, expected)


def pack(values, bits, dim):
    """GPTQ's words by numbers alone: along `dim`, the first lowest."""
    values = values.movedim(dim, -1).to(torch.int64)
    values = values.reshape(*values.shape[:-1], -1, 32 // bits)
    words = (values << (torch.arange(32 // bits) * bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).movedim(-1, dim).contiguous()


def gptq_by_formula(name, bits, group, symmetric, desc_act, seed):
    """Groups that are scattered over the inputs, which auto-round does not write, and partial last groups."""
    tensors, expected = {}, {}
    generator = torch.Generator().manual_seed(seed + 100)
    for module, weight in weights(seed).items():
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=generator) if desc_act else torch.arange(inputs)
        groups = torch.empty(inputs, dtype=torch.int64)
        groups[order] = torch.arange(inputs) // group
        scales, zeros = ranges(weight[:, order], group, bits, symmetric)
        codes = torch.clamp(torch.round(weight / scales[:, groups]) + zeros[:, groups], 0, 2**bits - 1)
        tensors[f"{module}.qweight"] = pack(codes.t(), bits, 0)
        tensors[f"{module}.qzeros"] = pack(zeros.t() - 1, bits, 1)
        tensors[f"{module}.scales"] = scales.t().half()
        tensors[f"{module}.g_idx"] = groups.to(torch.int32)
        expected[module] = (codes - zeros[:, groups]) * scales[:, groups]
    write(name, gptq_config(bits, group, symmetric, desc_act, checkpoint_format="gptq"), tensors, expected)


def compressed(name, compressor, seed, scale_dtype, group=None, **args):
    args = QuantizationArgs(**args, group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    tensors, expected = {}, {}
    for module, weight in weights(seed).items():
        out, inputs = weight.shape
        limit = 448 if args.type == "float" else 2 ** (args.num_bits - 1) - 1
        if args.strategy == "block":
            rows, columns = args.block_structure
            parts = [[block.abs().amax() for block in row.split(columns, 1)] for row in weight.split(rows, 0)]
            top = torch.tensor(parts)
        elif args.strategy == "tensor":
            top = weight.abs().amax().reshape(1)
        else:
            top = weight.abs().reshape(out, -1, group or inputs).amax(-1)
        state = {"weight": weight, "weight_scale": (top / limit).to(scale_dtype)}
        if not args.symmetric:
            low = weight.reshape(out, -1, group or inputs).amin(-1)
            high = weight.reshape(out, -1, group or inputs).amax(-1)
            scale = ((high - low) / (2**args.num_bits - 1)).to(scale_dtype)
            zero = torch.round(-(2 ** (args.num_bits - 1)) - low / scale.float()).clamp(-(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1) - 1)
            state |= {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
        else:
            state["weight_zero_point"] = torch.zeros_like(state["weight_scale"], dtype=torch.int8)
        packed = compressor.compress({key: value.clone() for key, value in state.items()}, scheme)
        for key, value in packed.items():
            tensors[f"{module}.{key}"] = value
        exact = packed | {"weight_scale": packed["weight_scale"].float()}
        expected[module] = compressor.decompress(exact, scheme)["weight"]
        assert (expected[module] - weight).abs().max() < 0.1, name
    formats = {PackedQuantizationCompressor: "pack-quantized", IntQuantizationCompressor: "int-quantized",
               FloatQuantizationCompressor: "float-quantized", NaiveQuantizationCompressor: "naive-quantized"}
    group = scheme.model_dump(mode="json") | {"targets": ["Linear"], "format": formats[compressor]}
    quantization = {"quant_method": "compressed-tensors", "format": formats[compressor], "config_groups": {"group_0": group}, "ignore": ["lm_head"],
                    "kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": None}
    write(name, quantization, tensors, expected)


def fp8(name, block, scale_dtype, seed):
    tensors, expected = {}, {}
    reader = Fp8Dequantize(None)
    for module, weight in weights(seed).items():
        rows, columns = block or weight.shape
        parts = [[part.abs().amax() for part in row.split(columns, 1)] for row in weight.split(rows, 0)]
        scales = (torch.tensor(parts) / 448).to(scale_dtype)
        each = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
        codes = (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{module}.weight"] = codes
        tensors[f"{module}.weight_scale_inv"] = scales if block else scales.reshape(())
        if weight.shape[0] % rows or weight.shape[1] % columns:
            # The reference reads whole blocks alone.
            expected[module] = codes.float() * each
        else:
            expected[module] = reader._dequantize_one(codes, scales.float(), torch.float32)
            assert torch.equal(expected[module], codes.float() * each), name
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    write(name, quantization, tensors, expected)


fp8("fp8-blocks", [32, 32], torch.bfloat16, 1)
fp8("fp8-partial-blocks", [128, 40], torch.float32, 2)
fp8("fp8-tensor", None, torch.float32, 3)
awq("awq", 32, 4)
awq("awq-rows", -1, 5)
gptq("gptq-v1", GptqV1, 4, 32, False, 6, checkpoint_format="gptq")
gptq("gptq-v1-symmetric", GptqV1, 4, -1, True, 7)
gptq("gptq-v2-8-bits", GptqV2, 8, 32, False, 8, checkpoint_format="gptq_v2")
gptq_by_formula("gptq-desc-act", 4, 32, False, True, 9)
gptq_by_formula("gptq-desc-act-8-bits", 8, 48, True, True, 10)
gptq_by_formula("gptq-partial-group", 4, 40, False, False, 11)
compressed("w4a16", PackedQuantizationCompressor, 12, torch.bfloat16, num_bits=4, group=32, strategy="group")
compressed("w4a16-asymmetric", PackedQuantizationCompressor, 13, torch.float16, num_bits=4, group=16, strategy="group", symmetric=False)
compressed("w8a16", PackedQuantizationCompressor, 14, torch.float32, num_bits=8, strategy="channel")
compressed("w8a8", IntQuantizationCompressor, 15, torch.bfloat16, num_bits=8, strategy="channel")
compressed("w8a8-asymmetric", IntQuantizationCompressor, 16, torch.bfloat16, num_bits=8, strategy="channel", symmetric=False)
compressed("fp8-dynamic", FloatQuantizationCompressor, 17, torch.bfloat16, num_bits=8, type="float", strategy="channel")
compressed("fp8-static", NaiveQuantizationCompressor, 18, torch.float32, num_bits=8, type="float", strategy="tensor")
compressed("fp8-block", FloatQuantizationCompressor, 19, torch.bfloat16, num_bits=8, type="float", strategy="block", block_structure=[32, 32])
auto_round("auto-round", GptqV2, 32, False, "auto_round", 20)
auto_round("auto-round-gptq", GptqV1, 32, True, "auto_round:auto_gptq", 21)
awq("auto-round-awq", 32, 22, auto_round_config(32, False, "auto_round:auto_awq"))
