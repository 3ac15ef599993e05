#!/usr/bin/env python3
"""Compares the logits of a model on the GPU with those of Transformers, position by position, for given tokens.

    PYTHONPATH=examples/python python3 tests/bench/transformers_parity.py FOLDER [--tokens 2048]

The reference is Transformers in f32. What Transformers itself loses in bf16 is the measure: the error of xserv in
bf16 should be about the same. Needs torch and transformers, and a GPU with room for the model in f32.
"""

import argparse
import gc
import random
import time

import numpy as np
import torch
import transformers
import xserv


def transformers_logits(folder, ids, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cuda:0")
    with torch.no_grad():
        logits = model(torch.tensor([ids], device="cuda:0")).logits[0].float().cpu().numpy()
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return logits


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    rng = random.Random(1)
    ids = [rng.randrange(1000, 50000) for _ in range(arguments.tokens)]

    model = xserv.Model(arguments.folder, device="cuda", dtype="bf16", kv_cache_tokens=arguments.tokens + 64)
    begin = time.monotonic()
    ours = np.asarray(model.logits(ids)).copy()
    print(f"xserv: {time.monotonic() - begin:.2f} s for {ours.shape} logits")
    model.close()
    reference = transformers_logits(arguments.folder, ids, torch.float32)
    theirs = transformers_logits(arguments.folder, ids, torch.bfloat16)

    def loss(logits):
        difference = (logits - reference).astype(np.float64)
        agree = np.mean(logits.argmax(axis=1) == reference.argmax(axis=1))
        return np.sqrt(np.mean(difference**2)), np.max(np.abs(difference)), agree

    std = reference.std()
    for name, logits in (("transformers bf16", theirs), ("xserv bf16", ours)):
        rms, worst, agree = loss(logits)
        print(f"{name:<18} rms {rms / std:.3e} std, max {worst / std:.3e} std, top-1 equal {100 * agree:.2f} %")
    print(f"ratio of rms: {loss(ours)[0] / loss(theirs)[0]:.3f}")


if __name__ == "__main__":
    main()
