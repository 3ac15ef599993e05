#!/usr/bin/env python3
"""Writes what Transformers' logits processors leave of given logits, one by one and together, in f64.

    python3 tests/golden/sampling/make_sampling.py > tests/golden/sampling/processors.json

Needs torch and transformers. Each case has the settings by the names of xserv's request, the tokens before, and the
probability of each token. The processors run in the order in which generate() puts them.
"""

import json
import random

import torch
import transformers
from transformers.generation import logits_process as lp

VOCAB = 48


def processors(case):
    """Returns the processors of a case, in the order of GenerationMixin._get_logits_processor."""
    found = []
    if "logit_bias" in case:
        found.append(lp.SequenceBiasLogitsProcessor({(int(token),): float(bias) for token, bias in case["logit_bias"]}))
    if "repetition_penalty" in case:
        found.append(lp.RepetitionPenaltyLogitsProcessor(penalty=case["repetition_penalty"]))
    if "no_repeat_ngram_size" in case:
        found.append(lp.NoRepeatNGramLogitsProcessor(case["no_repeat_ngram_size"]))
    found.append(lp.TemperatureLogitsWarper(case.get("temperature", 1.0)))
    if "top_k" in case:
        found.append(lp.TopKLogitsWarper(top_k=case["top_k"]))
    if "top_p" in case:
        found.append(lp.TopPLogitsWarper(top_p=case["top_p"]))
    if "min_p" in case:
        found.append(lp.MinPLogitsWarper(min_p=case["min_p"]))
    if "typical_p" in case:
        found.append(lp.TypicalLogitsWarper(mass=case["typical_p"]))
    return found


def main():
    dice = random.Random(17)
    logits = [[round(dice.gauss(0.0, scale), 3) for _ in range(VOCAB)] for scale in (0.3, 1.0, 3.0)]
    before = [5, 9, 2, 5, 9, 7, 5, 9, 2, 31, 5, 9]
    biases = [[3, 2.5], [4, -1.5], [5, 4.0], [9, -100.0]]
    single = [
        dict(), dict(temperature=0.5), dict(temperature=2.0), dict(logit_bias=biases),
        dict(repetition_penalty=1.3), dict(repetition_penalty=0.8),
        dict(no_repeat_ngram_size=1), dict(no_repeat_ngram_size=2), dict(no_repeat_ngram_size=3),
        dict(no_repeat_ngram_size=4), dict(no_repeat_ngram_size=40),
        dict(top_k=7), dict(top_p=0.6), dict(min_p=0.2),
        dict(typical_p=0.2), dict(typical_p=0.6), dict(typical_p=0.95),
    ]
    together = [
        dict(logit_bias=biases, repetition_penalty=1.4),
        dict(logit_bias=biases, repetition_penalty=1.4, no_repeat_ngram_size=2),
        dict(temperature=0.7, top_k=20, typical_p=0.5),
        dict(temperature=0.7, top_p=0.9, typical_p=0.7),
        dict(temperature=1.5, min_p=0.1, typical_p=0.4),
        dict(logit_bias=biases, repetition_penalty=1.2, no_repeat_ngram_size=3, temperature=0.8, top_k=25, top_p=0.95,
             min_p=0.02, typical_p=0.9),
    ]
    cases = []
    for row, values in enumerate(logits):
        for case in single + together:
            scores = torch.tensor([values], dtype=torch.float64)
            for processor in processors(case):
                scores = processor(torch.tensor([before]), scores)
            cases.append(dict(case, row=row, probabilities=[float(f"{p:.12g}") for p in scores.softmax(-1)[0].tolist()]))
    print(json.dumps(dict(transformers=transformers.__version__, before=before, logits=logits, cases=cases)))


if __name__ == "__main__":
    main()
