"""Runs every operator of the library on the caller's arrays, in place, and checks the results.

    python3 kernels.py [cpu|cuda]

On the CPU the arrays are NumPy's and the references NumPy's in float64. Where PyTorch is installed, the
same operators run on its tensors, in bfloat16 too, and on CUDA where it can be used; nothing is copied.
"""

import math
import sys

import numpy as np

from xserv import ops

try:
    import torch
except ImportError:
    torch = None

FAILED = []


def compare(name, got, want, bar):
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    error = float(np.max(np.abs(got - want) / (np.abs(want) + math.sqrt(float(np.mean(want**2))) + 1e-300), initial=0))
    good = got.shape == want.shape and error <= bar
    if not good:
        FAILED.append(name)
    print(f"  {name:24} largest error {error:.1e}  {'ok' if good else 'WRONG'}")


def erf(x):
    return np.vectorize(math.erf)(x)


def softmax(x):
    shares = np.exp(x - x.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def attention(q, k, v, causal):
    """[batch, length, heads, head_dim]; a key/value head serves a group of query heads."""
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = np.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    if causal:
        q_len, kv_len = scores.shape[-2:]
        unseen = np.arange(kv_len) > np.arange(q_len)[:, None] + kv_len - q_len
        scores = np.where(unseen, -np.inf, scores)
    return np.einsum("bhij,bjhd->bihd", softmax(scores), v)


def rotate(x, positions, cos, sin, pairing):
    c, s = cos[positions][:, None], sin[positions][:, None]
    half = x.shape[-1] // 2
    a, b = (x[..., :half], x[..., half:]) if pairing == "split_half" else (x[..., 0::2], x[..., 1::2])
    out = np.empty_like(x)
    one, two = a * c - b * s, b * c + a * s
    if pairing == "split_half":
        out[..., :half], out[..., half:] = one, two
    else:
        out[..., 0::2], out[..., 1::2] = one, two
    return out


class NumPy:
    """Arrays of NumPy in float32."""

    name, bar, product_bar = "NumPy, float32", 1e-5, 2e-5

    def __init__(self):
        self.random = np.random.default_rng(0)

    def normal(self, *shape):
        return self.random.standard_normal(shape, dtype=np.float32)

    def full(self, values):
        return np.array(values)

    def empty_like(self, array, shape=None, dtype=None):
        return np.zeros(array.shape if shape is None else shape, dtype=dtype or array.dtype)

    def read(self, array):
        return array.astype(np.float64)


class Torch:
    """Tensors of PyTorch."""

    def __init__(self, device, dtype):
        self.device, self.dtype = device, dtype
        self.name = f"PyTorch, {str(dtype).split('.')[-1]} on {device}"
        self.bar, self.product_bar = {torch.float32: (1e-5, 2e-5), torch.float16: (1e-3, 2e-3), torch.bfloat16: (8e-3, 1.6e-2)}[dtype]
        torch.manual_seed(0)

    def normal(self, *shape):
        return torch.randn(*shape).to(self.device, self.dtype)

    def full(self, values):
        made = torch.from_numpy(np.array(values))
        return made.to(self.device)

    def empty_like(self, array, shape=None, dtype=None):
        dtype = {None: array.dtype, np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32}[dtype]
        return torch.zeros(tuple(array.shape) if shape is None else shape, dtype=dtype, device=self.device)

    def read(self, array):
        return array.double().cpu().numpy()


def run(context, arrays):
    """Every operator once, against float64."""
    print(f"{arrays.name}, in a context on {context.device}")
    read, bar, product_bar = arrays.read, arrays.bar, arrays.product_bar

    def show(name, out, want, bar=bar):
        context.synchronize()
        compare(name, read(out), want, bar)

    x, y, weight, bias = (arrays.normal(*shape) for shape in ((33, 96), (33, 96), (96,), (96,)))
    out, other = arrays.empty_like(x), arrays.empty_like(x)
    X, Y, W, B = (read(array) for array in (x, y, weight, bias))

    def normed(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * W

    context.rms_norm(x, weight, 1e-6, out)
    show("rms_norm", out, normed(X))
    context.add_rms_norm(x, y, weight, 1e-6, other, out)
    show("add_rms_norm: sum", other, X + Y)
    show("add_rms_norm", out, normed(read(other)))
    context.layer_norm(x, weight, bias, 1e-5, out)
    centred = X - X.mean(-1, keepdims=True)
    show("layer_norm", out, centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * W + B)
    context.gelu(x, out)
    show("gelu", out, X * 0.5 * (1 + erf(X / math.sqrt(2))))
    context.gelu_tanh(x, out)
    show("gelu_tanh", out, X * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3))))
    context.silu(x, out)
    show("silu", out, X / (1 + np.exp(-X)))
    context.silu_mul(x, y, out)
    show("silu_mul", out, X / (1 + np.exp(-X)) * Y)
    context.softmax(x, out)
    show("softmax", out, softmax(X))
    context.add(x, y, out)
    show("add", out, X + Y)
    context.mul(x, y, out)
    show("mul", out, X * Y)
    context.copy(x[::2, 1::3], out[::2, 1::3])
    show("copy of a strided view", out[::2, 1::3], X[::2, 1::3], 0)
    wide = arrays.empty_like(x, dtype=np.float32)
    context.cast(x, wide) if arrays.bar > 1e-5 else context.copy(x, wide)
    show("cast", wide, X, 0)
    turned = arrays.empty_like(x, (96, 33))
    context.transpose(x, turned)
    show("transpose", turned, X.T, 0)

    ids = arrays.full(np.array([0, 32, 7, 7], dtype=np.int64))
    rows = arrays.empty_like(x, (4, 96))
    context.embedding(x, ids, rows)
    show("embedding", rows, X[[0, 32, 7, 7]], 0)
    largest = arrays.empty_like(x, (33,), np.int64)
    context.argmax(x, largest)
    show("argmax", largest, X.argmax(-1), 0)
    values, indices = arrays.empty_like(x, (33, 5)), arrays.empty_like(x, (33, 5), np.int32)
    context.top_k(x, values, indices)
    show("top_k", values, -np.sort(-X, -1)[:, :5], 0)

    q, k, v = (arrays.normal(1, 40, heads, 64) for heads in (4, 2, 2))
    positions = arrays.full(np.arange(40, dtype=np.int32))
    inv_freq = arrays.full((1e6 ** (-np.arange(32) / 32)).astype(np.float32))
    cos, sin = (arrays.empty_like(inv_freq, (64, 32)) for _ in range(2))
    context.rope_table(inv_freq, 1.0, cos, sin)
    angles = np.outer(np.arange(64), read(inv_freq))
    show("rope_table", cos, np.cos(angles), 1e-5)
    for pairing in ops.ROPE_PAIRINGS:
        q_out, k_out = arrays.empty_like(q[0]), arrays.empty_like(k[0])
        context.rope(q[0], k[0], positions, cos, sin, q_out, k_out, pairing)
        for name, source, result in (("q", q, q_out), ("k", k, k_out)):
            show(f"rope {pairing}: {name}", result, rotate(read(source[0]), np.arange(40), read(cos), read(sin), pairing))

    matrix = arrays.normal(96, 50)
    product = arrays.empty_like(x, (33, 50))
    context.gemm(x, matrix, product)
    show("gemm", product, X @ read(matrix), product_bar)
    gradient = arrays.normal(33, 50)
    da, db = arrays.empty_like(x), arrays.empty_like(matrix)
    context.gemm_backward(x, matrix, gradient, da, db)
    show("gemm_backward: dA", da, read(gradient) @ read(matrix).T, product_bar)
    show("gemm_backward: dB", db, X.T @ read(gradient), product_bar)
    sums, addend = arrays.empty_like(x, (33, 33)), arrays.normal(33)
    for code, bits, middle, error in (("int4", 4, 8, 0.3), ("int8", 8, 128, 0.03)):
        codes, scales = arrays.empty_like(x, (33, 96 * bits // 32), np.int32), arrays.empty_like(x, (33, 3), np.float32)
        zeros = arrays.empty_like(x, (33, 3), np.int32) if code == "int4" else None
        numbers = arrays.empty_like(x, dtype=np.float32)
        context.quantise(x, code, codes, scales, zeros, group_size=32)
        context.dequantise(code, codes, scales, zeros, numbers, group_size=32)
        show(f"quantise {code}", numbers, X, error)
        words = read(codes).astype(np.int64)[..., None] >> np.arange(0, 32, bits)
        steps = (words & (1 << bits) - 1).reshape(33, 3, 32) - (middle if zeros is None else read(zeros)[..., None])
        values = (steps * read(scales)[..., None]).reshape(33, 96)
        show(f"dequantise {code}", numbers, values, 1e-6)
        context.linear_quantised(y, code, codes, scales, zeros, addend, sums, group_size=32)
        # The CPU rounds the activations to 16 bits.
        show(f"linear_quantised {code}", sums, Y @ values.T + read(addend), max(product_bar, 1e-4))
    mixed = arrays.empty_like(q)
    for causal in (False, True):
        context.attention(q, k, v, mixed, causal=causal)
        show("attention, causal" if causal else "attention", mixed, attention(read(q), read(k), read(v), causal), product_bar)


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "auto"
    with ops.Context("cpu") as context:
        run(context, NumPy())
        if torch is not None:
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                run(context, Torch("cpu", dtype))
    on_cuda = device != "cpu" and torch is not None and torch.cuda.is_available() and ops.cuda_device_count() > 0
    if on_cuda:
        with ops.Context("cuda", stream=torch.cuda.current_stream().cuda_stream) as context:
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                run(context, Torch("cuda", dtype))
    elif device == "cuda":
        sys.exit("no CUDA device that both PyTorch and the library can use")
    print(f"WRONG: {', '.join(FAILED)}" if FAILED else "all as it should be")
    return bool(FAILED)


if __name__ == "__main__":
    sys.exit(main())
