#!/usr/bin/env python3
"""Times the operators on an NVIDIA GPU beside PyTorch's, in one run. Needs PyTorch with CUDA.

    PYTHONPATH=examples/python python3 tests/bench/cuda_kernels.py [--only NAME,...] [--compile] [--json FILE]

Every time is the median of replays of a CUDA graph whose launches rotate over buffer sets larger than the L2
cache, so that launch gaps and cached data stay out. GB/s counts the fewest bytes that the operation must
move, TFLOP/s the multiplications and additions (half of them where attention is causal). Ceilings of the
same run come first: reading, copying, and the largest matrix product. --compile adds torch.compile.
Prints a JSON line for each row and a table at the end.
"""

import argparse
import json
import math
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tables.timing import graph_time
from xserv import library_version, ops

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", F16: "f16", F32: "f32"}
ROWS = []
CEILING = {}


class Bench:
    def __init__(self, arguments):
        self.only = [name for name in arguments.only.split(",") if name]
        self.compile = arguments.compile
        self.contexts = {}

    def context(self):
        """A context on PyTorch's current stream: the one that is captured, while one is."""
        stream = torch.cuda.current_stream().cuda_stream
        if stream not in self.contexts:
            self.contexts[stream] = ops.Context("cuda", stream=stream)
        return self.contexts[stream]

    def run(self, op, shape, dtype, make, ours, peers, num_bytes=None, flops=None, set_bytes=None, most_sets=64):
        if self.only and not any(name in op for name in self.only):
            return
        num_sets = max(2, min(most_sets, math.ceil(400e6 / (set_bytes or num_bytes))))
        sets = [make() for _ in range(num_sets)]
        timed = [("xserv", lambda s: ours(self.context(), *s))]
        timed += [(name, lambda s, f=f: f(*s)) for name, f in peers.items()]
        for name, call in timed:
            if name == "compile" and not self.compile:
                continue
            row = {"op": op, "shape": shape, "dtype": NAMES[dtype], "by": name}
            try:
                milliseconds = graph_time([lambda s=s: call(s) for s in sets])
            except Exception as error:  # a peer that cannot do it is a row without a time
                row["error"] = repr(error)[:160]
                ROWS.append(row)
                print(json.dumps(row), flush=True)
                continue
            row["us"] = round(milliseconds * 1e3, 2)
            if num_bytes:
                row["gb_s"] = round(num_bytes / milliseconds / 1e6, 1)
                if "copy" in CEILING:
                    row["of_copy"] = round(row["gb_s"] / CEILING["copy"], 3)
            if flops:
                row["tflop_s"] = round(flops / milliseconds / 1e9, 1)
                if "gemm" in CEILING:
                    row["of_gemm"] = round(row["tflop_s"] / CEILING["gemm"], 3)
            ROWS.append(row)
            print(json.dumps(row), flush=True)
        del sets
        torch.cuda.empty_cache()


def random(*shape, dtype=BF16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def compiled(function):
    return torch.compile(function, fullgraph=True, dynamic=False)


def ceilings():
    def event_time(call, repetitions=9):
        call()
        times = []
        for _ in range(repetitions):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)

    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    CEILING["copy"] = round(2 * source.nbytes / event_time(lambda: target.copy_(source)) / 1e6, 1)
    del source, target
    a, b = random(8192, 8192), random(8192, 8192)
    c = torch.empty_like(a)
    CEILING["gemm"] = round(2 * 8192**3 / event_time(lambda: torch.mm(a, b, out=c), 20) / 1e9, 1)
    print(json.dumps({"ceiling": CEILING}), flush=True)


def rms_norm_of_sum(x, residual, weight):
    total = x + residual
    return total, F.rms_norm(total, (weight.shape[0],), weight, 1e-6)


def silu_mul_of_halves(fused):
    gate, up = fused.chunk(2, -1)
    return F.silu(gate) * up


def rope_split_half(q, k, cos, sin):
    def rotate(x):
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    return rotate(q), rotate(k)


def rows(bench):
    for dtype in (BF16, F32):
        for height, width in ((8192, 4096), (4096, 4096), (1, 4096)):
            n, shape = height * width * dtype.itemsize, f"{height}x{width}"
            make = lambda: (random(height, width, dtype=dtype), random(width, dtype=dtype), torch.empty(height, width, dtype=dtype, device="cuda"))
            norm = lambda x, w, o: F.rms_norm(x, (width,), w, 1e-6)
            bench.run("rms_norm", shape, dtype, make, lambda c, x, w, o: c.rms_norm(x, w, 1e-6, o),
                      {"eager": norm, "compile": compiled(norm)}, num_bytes=2 * n)
            layer = lambda x, w, o: F.layer_norm(x, (width,), w, w, 1e-5)
            bench.run("layer_norm", shape, dtype, make, lambda c, x, w, o: c.layer_norm(x, w, w, 1e-5, o),
                      {"eager": layer, "compile": compiled(layer)}, num_bytes=2 * n)
            make4 = lambda: tuple(random(height, width, dtype=dtype) for _ in range(4)) + (random(width, dtype=dtype),)
            fused = lambda x, r, ro, o, w: rms_norm_of_sum(x, r, w)
            bench.run("add_rms_norm", shape, dtype, make4, lambda c, x, r, ro, o, w: c.add_rms_norm(x, r, w, 1e-6, ro, o),
                      {"eager": fused, "compile": compiled(fused)}, num_bytes=4 * n)
            if height == 1:
                continue
            make2 = lambda: (random(height, width, dtype=dtype), torch.empty(height, width, dtype=dtype, device="cuda"))
            for name, torch_form in (
                ("gelu_tanh", lambda x, o: F.gelu(x, approximate="tanh")),
                ("gelu", lambda x, o: F.gelu(x)),
                ("silu", lambda x, o: F.silu(x)),
                ("softmax", lambda x, o: torch.softmax(x, -1)),
            ):
                bench.run(name, shape, dtype, make2, lambda c, x, o, name=name: getattr(c, name)(x, o),
                          {"eager": torch_form, "compile": compiled(torch_form)}, num_bytes=2 * n)
        n = 4096 * 32768 * dtype.itemsize
        wide = lambda x, o: torch.softmax(x, -1)
        bench.run("softmax", "4096x32768", dtype, lambda: (random(4096, 32768, dtype=dtype),) * 1 + (torch.empty(4096, 32768, dtype=dtype, device="cuda"),),
                  lambda c, x, o: c.softmax(x, o), {"eager": wide, "compile": compiled(wide)}, num_bytes=2 * n)
        n = 4096 * 12288 * dtype.itemsize
        halves = lambda fused, o: silu_mul_of_halves(fused)
        bench.run("silu_mul", "4096x12288", dtype, lambda: (random(4096, 2 * 12288, dtype=dtype), torch.empty(4096, 12288, dtype=dtype, device="cuda")),
                  lambda c, fused, o: c.silu_mul(fused[:, :12288], fused[:, 12288:], o), {"eager": halves, "compile": compiled(halves)}, num_bytes=3 * n)
        n = 8192 * 4096 * dtype.itemsize
        bench.run("add", "8192x4096", dtype, lambda: tuple(random(8192, 4096, dtype=dtype) for _ in range(3)),
                  lambda c, a, b, o: c.add(a, b, o), {"eager": lambda a, b, o: torch.add(a, b, out=o)}, num_bytes=3 * n)
        bench.run("transpose", "8192x4096", dtype, lambda: (random(8192, 4096, dtype=dtype), random(4096, 8192, dtype=dtype)),
                  lambda c, x, o: c.transpose(x, o), {"eager": lambda x, o: o.copy_(x.t())}, num_bytes=2 * n)
    bench.run("cast f32 to", "8192x4096", BF16, lambda: (random(8192, 4096, dtype=F32), random(8192, 4096)),
              lambda c, x, o: c.cast(x, o), {"eager": lambda x, o: o.copy_(x)}, num_bytes=6 * 8192 * 4096)


def indices(bench):
    for dtype in (BF16, F32):
        table = random(151936, 4096, dtype=dtype)
        for tokens in (8192, 1):
            bench.run("embedding", f"{tokens}x4096", dtype,
                      lambda: (torch.randint(0, 151936, (tokens,), device="cuda"), torch.empty(tokens, 4096, dtype=dtype, device="cuda")),
                      lambda c, ids, o: c.embedding(table, ids, o), {"eager": lambda ids, o: F.embedding(ids, table)},
                      num_bytes=2 * tokens * 4096 * dtype.itemsize, most_sets=8 if tokens > 1 else 64)
        del table
        for tokens in (8192, 2048, 1):
            def make():
                angles = torch.outer(torch.arange(tokens, device="cuda").float(), torch.rand(64, device="cuda"))
                positions = torch.arange(tokens, device="cuda", dtype=torch.int32)
                return random(tokens, 32, 128, dtype=dtype), random(tokens, 8, 128, dtype=dtype), angles.cos(), angles.sin(), positions, random(tokens, 32, 128, dtype=dtype), random(tokens, 8, 128, dtype=dtype)
            peer = lambda q, k, cos, sin, p, qo, ko: rope_split_half(q, k, cos[:, None], sin[:, None])
            bench.run("rope 32+8 heads", f"{tokens} tokens", dtype, make, lambda c, q, k, cos, sin, p, qo, ko: c.rope(q, k, p, cos, sin, qo, ko),
                      {"eager": peer, "compile": compiled(peer)}, num_bytes=2 * tokens * 40 * 128 * dtype.itemsize)
    for height in (1, 32):
        logits = lambda: (random(height, 151936), torch.empty(height, dtype=torch.int64, device="cuda"))
        n = height * 151936 * 2
        bench.run("argmax", f"{height}x151936", BF16, logits, lambda c, x, o: c.argmax(x, o), {"eager": lambda x, o: torch.argmax(x, -1)}, num_bytes=n)
        best = lambda: (random(height, 151936), random(height, 50), torch.empty(height, 50, dtype=torch.int32, device="cuda"))
        bench.run("top_k 50", f"{height}x151936", BF16, best, lambda c, x, v, i: c.top_k(x, v, i), {"eager": lambda x, v, i: torch.topk(x, 50)}, num_bytes=n)


def gemm(bench):
    shapes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288), "lm_head": (151936, 4096)}
    for name, (n, k) in shapes.items():
        inductor = torch.compile(F.linear, fullgraph=True, dynamic=False, options={"coordinate_descent_tuning": True}) if bench.compile else None
        for m in (1, 2, 4, 8, 16, 64, 128, 512, 2048, 8192):
            if name == "lm_head" and m > 16:
                continue
            bytes_moved, flops = 2 * (m * k + n * k + m * n), 2 * m * n * k
            make = lambda: (random(m, k), random(n, k), torch.empty(m, n, dtype=BF16, device="cuda"))
            kind = {"num_bytes": bytes_moved} if m <= 128 else {"flops": flops, "set_bytes": bytes_moved}
            peers = {"cublas": lambda x, w, o: F.linear(x, w)}
            if m == 1 and inductor:
                peers["compile"] = lambda x, w, o: inductor(x, w)
            bench.run(f"gemm {name}", f"{m}x{n}x{k}", BF16, make, lambda c, x, w, o: c.gemm(x, w, o, transpose_b=True), peers, most_sets=16, **kind)
            if m >= 512:
                bench.run(f"gemm {name} tensor_core", f"{m}x{n}x{k}", BF16, make,
                          lambda c, x, w, o: c.gemm(x, w, o, transpose_b=True, backend="tensor_core"), {}, most_sets=16, **kind)
    for m in (1, 128, 2048):
        n, k = shapes["qkv"]
        bench.run("gemm qkv", f"{m}x{n}x{k}", F32, lambda: (random(m, k, dtype=F32), random(n, k, dtype=F32), torch.empty(m, n, device="cuda")),
                  lambda c, x, w, o: c.gemm(x, w, o, transpose_b=True), {"cublas": lambda x, w, o: F.linear(x, w)},
                  flops=2 * m * n * k, set_bytes=4 * (m * k + n * k), most_sets=16)


def attention(bench):
    back_ends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

    def peers(causal):
        def one(back_end):
            def call(q, k, v, o):
                with sdpa_kernel(back_end):
                    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=True)
            return call
        return {name: one(back_end) for name, back_end in back_ends.items()}

    # [batch, heads, length, head_dim] in memory, as PyTorch likes it best; xserv takes the permuted view.
    def tensors(batch, q_len, kv_len, heads, dim=128):
        make = lambda h, length: random(batch, h, length, dim).transpose(1, 2)
        return lambda: (make(heads, q_len), make(8, kv_len), make(8, kv_len), make(heads, q_len))

    # The keys and values of a sequence in blocks of 32 tokens, in a shuffled order.
    def paged(length, heads, dim):
        def make():
            q, cache = random(length, heads, dim), lambda: random(length // 32, 32, 8, dim)
            table = torch.randperm(length // 32, device="cuda", dtype=torch.int32)[None]
            index = lambda *values: torch.tensor(values, device="cuda", dtype=torch.int32)
            return q, cache(), cache(), torch.empty_like(q), table, index(length), index(0, length)
        return make

    def paged_attention(c, q, k, v, o, table, lens, ends):
        length = q.shape[0]
        c.attention(q, k, v, o, causal=True, block_tables=table, context_lens=lens, cu_seqlens_q=ends,
                    max_q_len=length, max_kv_len=length)

    for heads, dim in ((32, 128), (16, 128), (32, 64)):
        for length in (512, 2048, 8192):
            cost = {"flops": 4 * heads * dim * length * (length + 1) / 2,
                    "set_bytes": (2 * heads + 16) * length * dim * 2}
            bench.run(f"attention prefill {heads}/8 of {dim}", f"{length}", BF16, tensors(1, length, length, heads, dim),
                      lambda c, q, k, v, o: c.attention(q, k, v, o, causal=True), peers(True), **cost)
            bench.run(f"attention paged prefill {heads}/8 of {dim}", f"{length}", BF16, paged(length, heads, dim),
                      paged_attention, {}, **cost)
    for batch, length in ((1, 512), (1, 4096), (1, 32768), (8, 4096), (32, 512), (32, 4096), (128, 4096)):
        bench.run("attention decode 32/8", f"{batch} x {length}", BF16, tensors(batch, 1, length, 32),
                  lambda c, q, k, v, o: c.attention(q, k, v, o), peers(False), num_bytes=batch * 8 * length * 512)
    q, k, v, o = tensors(1, 32768, 32768, 32)()
    context = bench.context()
    before = context.memory_stats()
    context.attention(q, k, v, o, causal=True)
    context.synchronize()
    used = context.memory_stats()["peak"] - before["peak"]
    print(json.dumps({"op": "attention prefill", "shape": "32768", "workspace_bytes": used}), flush=True)


def table():
    print(f"\n{'operation':34} {'shape':18} {'type':5} {'by':8} {'us':>9} {'rate':>14} {'share':>7}")
    for row in ROWS:
        if "error" in row:
            print(f"{row['op']:34} {row['shape']:18} {row['dtype']:5} {row['by']:8} {row['error'][:50]}")
            continue
        rate = f"{row['gb_s']:.0f} GB/s" if "gb_s" in row else f"{row['tflop_s']:.1f} TFLOP/s"
        share = row.get("of_copy", row.get("of_gemm"))
        print(f"{row['op']:34} {row['shape']:18} {row['dtype']:5} {row['by']:8} {row['us']:9.2f} {rate:>14} {'' if share is None else f'{share:7.1%}'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names of operations, with commas")
    parser.add_argument("--compile", action="store_true", help="torch.compile beside; takes minutes")
    parser.add_argument("--groups", default="rows,indices,gemm,attention")
    parser.add_argument("--json", help="also write the rows to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or ops.cuda_device_count() == 0:
        sys.exit("skipped: no CUDA device")
    properties = torch.cuda.get_device_properties(0)
    print(json.dumps({"gpu": properties.name, "torch": torch.__version__, "xserv": library_version}), flush=True)
    if arguments.compile:
        from torch import _dynamo

        _dynamo.config.recompile_limit = 256
    bench = Bench(arguments)
    with torch.no_grad():
        ceilings()
        for group in arguments.groups.split(","):
            {"rows": rows, "indices": indices, "gemm": gemm, "attention": attention}[group](bench)
    table()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"ceiling": CEILING, "rows": ROWS}, file, indent=1)


if __name__ == "__main__":
    main()
