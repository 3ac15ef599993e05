"""Answers several questions at once with asyncio:  python3 serve.py MODEL [QUESTION...]"""

import asyncio
import sys

import xserv


async def answer(model: xserv.Model, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    async with model.generate_async(messages=messages, max_tokens=128) as stream:
        return "".join([piece async for piece in stream])


async def serve(path: str, questions: list) -> None:
    with xserv.Model(path) as model:
        answers = await asyncio.gather(*(answer(model, question) for question in questions))
        for question, text in zip(questions, answers):
            print(f"> {question}\n{text}")
        stats = model.stats()
        print(f"{stats.total_generated_tokens} tokens in {stats.total_steps} steps", file=sys.stderr)


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        asyncio.run(serve(sys.argv[1], sys.argv[2:] or ["Tell me a story.", "What is 2 plus 3?", "Hello!"]))
    except xserv.Error as error:
        print(f"{error} ({error.status})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
