"""A program as a user writes it: it must be clean under mypy --strict and pyright's strict mode, and it must run.

    python3 typed_program.py MODEL
"""

# pyright: strict

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, List, Union

import xserv
from xserv import ops

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Storyteller:
    """Wraps a model, and hands the options of generate() on."""

    def __init__(self, model: xserv.Model) -> None:
        self.model = model

    def tell(self, beginning: str, **options: Unpack[xserv.GenerateOptions]) -> str:
        options.setdefault("max_tokens", 8)
        result: xserv.Result = self.model.generate(beginning, **options)
        return beginning + result.text

    def answer(self, question: str) -> List[str]:
        messages = [{"role": "user", "content": question}]
        stream: xserv.TextStream = self.model.generate(messages=messages, stream=True, max_tokens=8, num_samples=2)
        answers = ["", ""]
        with stream:
            for piece in stream:
                answers[piece.sample] += piece
        return answers

    def either(self, stream: bool) -> str:
        some: Union[xserv.Result, xserv.TextStream] = self.model.generate("Once", stream=stream, max_tokens=2)
        return some.text if isinstance(some, xserv.Result) else some.wait().text

    def weigh(self, beginning: str) -> List[float]:
        weights: List[float] = []
        stream = self.model.generate(beginning, stream=True, max_tokens=4, logprobs=2, logit_bias={5: -1.5})
        for event in stream.events():
            if event.logprob is not None and event.top_logprobs is not None:
                best: xserv.TokenLogProb = event.top_logprobs[0]
                weights.append(event.logprob - best.logprob)
        return weights

    def calls(self, question: str) -> List[str]:
        messages = [{"role": "user", "content": question}]
        stream = self.model.generate(messages=messages, stream=True, max_tokens=4)
        names: List[str] = []
        for event in stream.events(answers=True):
            if isinstance(event, xserv.AnswerEvent) and event.name is not None:
                names.append(event.name)
        result = stream.wait()
        calls: List[xserv.ToolCall] = result.tool_calls
        assert names == [call.name for call in calls]
        return names

    async def follow(self, beginning: str) -> int:
        count = 0
        async for event in self.model.generate_async(beginning, max_tokens=4).events():
            count += event.token_id is not None
        return count

    async def tell_many(self, beginnings: List[str]) -> List[str]:
        async def tell(beginning: str) -> str:
            async with self.model.generate_async(beginning, max_tokens=8) as stream:
                pieces = [piece async for piece in stream]
            assert stream.result is not None
            return "".join(pieces)

        return await asyncio.gather(*(tell(beginning) for beginning in beginnings))


def load(path: str) -> xserv.Model:
    def show(fraction: float) -> None:
        print(f"{fraction:.0%}", end="\r", file=sys.stderr)

    planned = xserv.plan(path, device="cpu")
    assert planned.fits and planned.total_bytes > 0
    return xserv.Model(path, device="cpu", dtype="auto", progress=show)


def main() -> int:
    try:
        load("/no/such/folder")
    except FileNotFoundError as error:
        assert isinstance(error, xserv.Error) and error.code == 3
    with load(sys.argv[1]) as model:
        teller = Storyteller(model)
        print(teller.tell("Once upon a time", temperature=0, stop=["."]))
        print(teller.answer("What is 2 plus 3?"))
        print(teller.either(True) == teller.either(False))
        print(asyncio.run(teller.tell_many(["Once", "One day"])))
        print(max(teller.weigh("Once")) <= 0, asyncio.run(teller.follow("Once")) > 0)
        logits = model.logits(model.tokenize("Once"), last_only=True)
        best = max(range(model.info.vocab_size), key=lambda token: logits[0, token])
        print(model.detokenize([best]), logits.shape, model.stats().total_steps)
        one, other = model.score("Once upon a", [" time", model.tokenize(" car")])
        best_score: float = max(one.sum, other.sum)
        print(best_score == one.sum, one.is_greedy, other.logprobs[0] < 0, model.perplexity("Once upon a time") > 1)
    with ops.Context("cpu", num_threads=1) as context:
        print(context.device, context.memory_stats()["allocated"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
