"""EleutherAI's lm-eval by completions equals the same by Transformers on the same folder.

It needs `pip install 'lm_eval[hf,api]'` besides, and is left out without. The task is made here: opposites and capitals, of
which the small model knows some, as a choice of several answers, and as a text to be written.
"""

import importlib.util
import json
import os
import tempfile
import unittest
from pathlib import Path

from support import MODEL, NAME, Server

OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("happy", "sad"), ("early", "late"), ("left", "right"), ("easy", "difficult"),
    ("dirty", "clean"), ("win", "lose"), ("push", "pull"), ("begin", "finish"), ("fast", "slow"), ("open", "closed"),
)  # fmt: skip
CAPITALS = (
    ("Peru", "Lima"), ("Germany", "Berlin"), ("England", "London"), ("China", "Beijing"), ("Cuba", "Havana"),
    ("Norway", "Oslo"), ("Austria", "Vienna"), ("Chile", "Santiago"), ("Iceland", "Reykjavik"), ("Finland", "Helsinki"),
)  # fmt: skip

HAS_LM_EVAL = all(importlib.util.find_spec(name) for name in ("lm_eval", "transformers", "torch"))


def documents():
    for pairs, text in ((OPPOSITES, "The opposite of {} is"), (CAPITALS, "The capital of {} is")):
        for index, (word, answer) in enumerate(pairs):
            others = [pairs[(index + step) % len(pairs)][1] for step in (1, 2, 3)]
            choices = [*others[: index % 4], answer, *others[index % 4 :]]
            yield {"question": text.format(word), "choices": choices, "answer": index % 4}


def tasks(folder):
    """Writes the tasks, and returns their configurations."""
    file = Path(folder, "documents.jsonl")
    file.write_text("".join(json.dumps(document) + "\n" for document in documents()))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choosing = {
        **common,
        "task": "xserv_choosing",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    writing = {
        **common,
        "task": "xserv_writing",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    }
    return [choosing, writing]


@unittest.skipUnless(HAS_LM_EVAL, "lm_eval, transformers and torch are not installed")
class LmEval(unittest.TestCase):
    def evaluate(self, folder, model, arguments):
        import lm_eval

        found = lm_eval.simple_evaluate(model=model, model_args=arguments, tasks=tasks(folder), log_samples=True, batch_size=8)
        return found

    def test_it_equals_transformers(self):
        with tempfile.TemporaryDirectory() as folder, Server("--dtype", "f32", "--no-request-log") as server:
            os.environ.update(HF_HOME=folder, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
            ours = self.evaluate(
                folder,
                "local-completions",
                {
                    "model": NAME,
                    "base_url": server.url + "/v1/completions",
                    "tokenizer": MODEL,
                    "num_concurrent": 4,
                    "max_length": 2048,
                },
            )
            theirs = self.evaluate(folder, "hf", {"pretrained": MODEL, "dtype": "float32", "device": "cpu"})
        for task in ("xserv_choosing", "xserv_writing"):
            for name, value in theirs["results"][task].items():
                if isinstance(value, float):
                    self.assertAlmostEqual(ours["results"][task][name], value, delta=1e-3, msg=f"{task} {name}")
        largest, num_choices = 0.0, 0
        pairs = zip(ours["samples"]["xserv_choosing"], theirs["samples"]["xserv_choosing"])
        for own, other in pairs:
            self.assertEqual(own["doc_id"], other["doc_id"])
            for (own_sum, own_greedy), (other_sum, other_greedy) in zip(own["filtered_resps"], other["filtered_resps"]):
                largest = max(largest, abs(float(own_sum) - float(other_sum)))
                num_choices += 1
                self.assertEqual(str(own_greedy), str(other_greedy))
        self.assertEqual(num_choices, 4 * len(list(documents())))
        self.assertLess(largest, 1e-3)
        for own, other in zip(ours["samples"]["xserv_writing"], theirs["samples"]["xserv_writing"]):
            self.assertEqual(own["resps"], other["resps"])
        accuracy = theirs["results"]["xserv_choosing"]["acc,none"]
        print(f"lm-eval: accuracy {accuracy:.3f}, the largest difference of a log-likelihood is {largest:.2g}")


if __name__ == "__main__":
    unittest.main()
